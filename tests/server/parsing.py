"""Read what a parser of tool calls gives, as a client would put it together."""

from nanoactor.server.tool_calls import Arguments, Call


def found(make, pieces):
    """(text, [(name, arguments)]), with pieces in an order that a client can put together."""
    parser, said, calls = make(), "", []
    for piece in [p for text in pieces for p in parser.push(text)] + parser.finish():
        if isinstance(piece, Call):
            assert piece.index == len(calls)
            calls.append([piece.name, ""])
        elif isinstance(piece, Arguments):
            assert piece.index == len(calls) - 1
            calls[-1][1] += piece.text
        else:
            assert piece
            said += piece
    return said, [tuple(call) for call in calls]
