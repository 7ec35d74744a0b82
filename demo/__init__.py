"""Two small trained models, the facts they know, and a client that shows them being served."""
