"""Snapshots: written beside their final name, sealed by a manifest, verified, leased, retired."""
