"""GuideLLM: a benchmark of four chats of eight tokens each."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any


def main(server: str, *_: str) -> dict[str, Any]:
    """Counts of the requests, and the tokens of each."""
    with tempfile.TemporaryDirectory() as directory:
        report = pathlib.Path(directory) / "report.json"
        options = {
            # without /v1
            "--backend": f"kind=openai_http,target={server},model=demo",
            "--profile": "kind=synchronous",
            "--constraint": "kind=max_requests,count=4",
            # without it the served name is looked for on the hub
            "--tokenizer": f"kind=huggingface_auto,model={os.environ['TOKENIZER']}",
            "--data": "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
            "--output": f"kind=json,path={report}",
        }
        words = [word for option in options.items() for word in option]
        program = pathlib.Path(sys.executable).with_name("guidellm")
        subprocess.run([program, "run", *words, "--disable-console"], check=True, stdout=sys.stderr)
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    return {
        "benchmark": {
            "successful": len(requests["successful"]),
            "errored": len(requests["errored"]),
            "output_tokens": [request["output_metrics"]["text_tokens"] for request in requests["successful"]],
        }
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
