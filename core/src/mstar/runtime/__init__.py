"""One served model, from task to deltas; the offline API."""
