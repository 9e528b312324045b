"""Where outcomes go, and how a person sees them."""
