"""`art.serverless` under hone's name: a hone server at a URL, which somebody else runs."""
