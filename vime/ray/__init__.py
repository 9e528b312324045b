"""The collaborators of a run on a Ray cluster; nothing outside this package imports Ray."""
