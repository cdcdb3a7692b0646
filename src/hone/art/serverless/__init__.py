"""`art.serverless` under hone's name: a running hone server at a URL."""
