"""The life of an eval point, from the admission window to its one outcome."""
