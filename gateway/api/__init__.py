"""The REST API: routes of OpenAI, SGLang and vLLM, their bodies and errors."""
