"""The parts of ``http_cost.py``: a worker that costs nothing, a bare server beside, a client that counts."""
