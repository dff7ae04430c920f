"""The executor ``ray``: workers as actors of a Ray cluster. Imported only if a deployment asks for it."""
