#!/usr/bin/env python3
"""Models of this project in EleutherAI's lm-evaluation-harness (pip install lm_eval): the model type "gpt2_sla", which
asks evaluate_gpt2_sla for likelihoods and texts through a pipe.

    make evaluate_gpt2_sla_cpu
    python3 dev/lm_eval/gpt2_sla.py run --model gpt2_sla --model_args model=runs/gcide-2400/step_00002400 \\
        --tasks lambada_openai,hellaswag

The command line is lm_eval's own. model_args: model, the folder; program, by default evaluate_gpt2_sla where it is
built, else evaluate_gpt2_sla_cpu; tokenizer, a vocabulary where the folder has none; slots, how many sequences are
computed at a time.
"""
import json
import subprocess
from pathlib import Path

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent.parent
REQUESTS_A_LINE = 256  # so that the bar moves; the program computes as many at a time as it has slots
MAX_GEN_TOKS = 256     # as lm_eval's "hf"


@register_model("gpt2_sla")
class Gpt2Sla(LM):
    # The harness passes the last three to every model; the program decides them itself.
    def __init__(self, model, program=None, tokenizer=None, slots=None, batch_size=None, max_batch_size=None,
                 device=None):
        super().__init__()
        if program is None:
            gpu = ROOT / "evaluate_gpt2_sla"
            program = gpu if gpu.exists() else ROOT / "evaluate_gpt2_sla_cpu"
        command = [str(program), str(model), "--serve"]
        if tokenizer is not None:
            command += ["--tokenizer", str(tokenizer)]
        if slots is not None:
            command += ["--slots", str(slots)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        encoding="utf-8")

    def ask(self, name, items, disable_tqdm):
        """The answers to `items`, in their order. llmc/train/evaluation.h has the protocol."""
        answers = []
        with tqdm(total=len(items), desc=name, disable=disable_tqdm) as bar:
            for first in range(0, len(items), REQUESTS_A_LINE):
                part = items[first:first + REQUESTS_A_LINE]
                try:
                    self.process.stdin.write(json.dumps({name: part}) + "\n")
                    self.process.stdin.flush()
                except BrokenPipeError:
                    pass  # the program has ended, and said why on stderr
                line = self.process.stdout.readline()
                if not line:
                    raise RuntimeError(f"{self.process.args[0]} ended with status {self.process.wait()}")
                answer = json.loads(line)
                if "error" in answer:
                    raise RuntimeError(f"{name}, from request {first + 1} on: {answer['error']}")
                answers += answer[name]
                bar.update(len(part))
        return answers

    def loglikelihood(self, requests, disable_tqdm=False):
        scores = self.ask("loglikelihood", [request.args for request in requests], disable_tqdm)
        return [(score, is_greedy) for score, is_greedy in scores]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        return self.ask("loglikelihood_rolling", [request.args[0] for request in requests], disable_tqdm)

    def generate_until(self, requests, disable_tqdm=False):
        return self.ask("generate_until", [generation(*request.args) for request in requests], disable_tqdm)


def generation(context, gen_kwargs):
    kwargs = normalize_gen_kwargs(gen_kwargs, MAX_GEN_TOKS)
    kwargs.pop("do_sample", None)  # without it the temperature is 0
    item = {"context": context, "until": kwargs.pop("until"), "max_tokens": kwargs.pop("max_gen_toks")}
    item.update({key: kwargs.pop(key) for key in ("temperature", "top_k", "top_p") if key in kwargs})
    if kwargs:
        raise ValueError(f"generation_kwargs: {', '.join(kwargs)}: the program has no such option")
    return item


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate
    cli_evaluate()
