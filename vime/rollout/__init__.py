"""The contracts that users of vime subclass or call."""
