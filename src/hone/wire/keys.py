"""The inference key of a server, derived from its API key.

In:   the API key, which opens everything
Out:  the key that opens the inference APIs alone; it does not reveal the first
"""

import base64
import hmac

INFERENCE = "hone-inference-"
"""How an inference key begins."""


def derive_inference_key(api_key: str) -> str:
    digest = hmac.digest(api_key.encode(), b"hone: OpenAI API only", "sha256")
    return INFERENCE + base64.urlsafe_b64encode(digest[:24]).decode()
