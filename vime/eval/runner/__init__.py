"""The evaluation itself: prompts in, rewards out, in a process of its own."""
