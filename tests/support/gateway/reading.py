"""Texts with tool calls, read in pieces."""

from gateway.parsers.output import OutputParser


def read(make, text, size, max_calls=None):
    """Content and calls, (name, arguments) each."""
    parser = OutputParser(None, make(), max_calls=max_calls)
    content, calls = "", []
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    for index, piece in enumerate(pieces):
        output = parser.push(piece, last=index == len(pieces) - 1)
        content += output.content
        for part in output.calls:
            if part.name is not None:
                assert part.call == len(calls)
                calls.append([part.name, ""])
            calls[part.call][1] += part.arguments
    return content, [tuple(call) for call in calls]
