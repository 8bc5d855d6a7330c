"""The episode loop and everything around it: engines, transcripts, workers. Uses `envs` and `buffer`."""
