"""OpenAI's routes: requests, answers and the way to a task."""
