"""The one tag that chat templates use beyond jinja's own."""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks what an assistant wrote, for training;
    a prompt is rendered as if the tags were not there."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja asks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """What stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
