"""What is the user's, kept before something runs and put back after it."""
