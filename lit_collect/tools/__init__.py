"""What the command line offers beside training: looking at an env, and measuring settings."""
