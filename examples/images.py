"""Ask a model about images.

    python examples/images.py
    python examples/images.py photo.jpg other.png --model Qwen/Qwen3-VL-2B-Instruct \
        --question "What is in this image?"

`demo-vl` is a tiny model that reads one to three digits and nothing else.
"""

import argparse
from pathlib import Path

from nanoactor import LLM, SamplingParams

DIGITS = Path(__file__).with_name("three-digits.png")


def main() -> None:
    """Read the command line, ask about all images at once, and print the answers."""
    parser = argparse.ArgumentParser(description="Ask a model about images.")
    parser.add_argument("images", nargs="*", type=Path, default=[DIGITS])
    parser.add_argument("--model", default="demo-vl", help="a directory, or a name on the hub")
    parser.add_argument("--question", default="read: ")
    given = parser.parse_args()

    # One conversation for each image. A message's content is a list of parts, in the order in
    # which the model sees them. An image is a path, bytes, a `data:` URL, a PIL image or an array;
    # one conversation may have several.
    conversations = [
        [
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": str(path)},
                    {"type": "text", "text": given.question},
                ],
            }
        ]
        for path in given.images
    ]
    # Temperature 0 always takes the likeliest token: reading has one right answer.
    params = SamplingParams(temperature=0, max_tokens=64)
    with LLM(given.model) as llm:
        outputs = llm.chat(conversations, params, use_tqdm=False)
    for path, output in zip(given.images, outputs, strict=True):
        print(f"{path}: {output.outputs[0].text}")


if __name__ == "__main__":
    main()
