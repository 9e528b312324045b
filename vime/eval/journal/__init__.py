"""The run's directory as a journal: who has it, what an earlier run left, how it goes on."""
