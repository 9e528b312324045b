"""Child processes that never outlive their owner."""
