"""Print what is supported, from the results of the tests: it cannot claim more than they show.

    pytest tests -m "slow or not slow" --junitxml=support.xml
    python -m tests.support_table support.xml --insert README.md

Rows are model families. The columns after them are attention implementations (are the statistics
those of the model's eager weights?) and ways of training (is what is seen complete and named, and
does nothing change?). A mark is printed only for tests that ran and passed; what was skipped or not
run stays empty.
"""

import argparse
import re
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

PASSED, FAILED, NOT_RUN = "yes", "**no**", ""

TITLES = {
    "gpt_neox": "GPT-NeoX, Pythia",
    "gpt2": "GPT-2",
    "gptj": "GPT-J",
    "llama": "Llama (GQA)",
    "mistral": "Mistral (window)",
    "qwen3": "Qwen3 (qk-norm)",
    "gemma2": "Gemma 2 (soft-cap)",
    "gemma3": "Gemma 3",
    "gpt_oss": "gpt-oss (learned sinks)",
    "deepseek_v3": "DeepSeek-V3 (MLA)",
    "phi3": "Phi-3",
    "falcon_alibi": "Falcon (ALiBi)",
    "falcon_mqa": "Falcon (MQA)",
    "bloom": "BLOOM",
    "mpt": "MPT",
    "bert": "BERT",
    "roberta": "RoBERTa",
    "modernbert": "ModernBERT (local windows)",
    "albert": "ALBERT (shared layers)",
    "deberta": "DeBERTa-v2",
    "t5": "T5 (relative bias)",
    "bart": "BART",
    "whisper": "Whisper",
    "vit": "ViT",
    "dinov2_registers": "DINOv2 with registers",
    "clip": "CLIP (two towers)",
    "jamba": "Jamba (Mamba layers)",
}

MODEL_TESTS = {
    "test_statistics_equal_those_of_the_eager_weights": "numbers",
    "test_training_is_the_same_bit_for_bit": "same training",
    "test_compiled": "compiled",
    "test_checkpointed": "checkpointed",
    "test_bf16": "bf16",
    "test_flex_attention_has_no_backward_on_a_cpu_but_right_numbers": "numbers",
}
WAYS = ("eager", "sdpa", "flex_attention")
MODES = ("same training", "compiled", "checkpointed", "bf16")

OTHERS = {
    "capture.test_torch_modules": "torch.nn: MultiheadAttention, TransformerEncoder, fast path",
    "capture.test_handmade": "written by hand: matmul, einsum, folded, masks of -1e9, -1e4, -inf",
    "capture.test_fused": "kernels of F.scaled_dot_product_attention, flash-attn operations",
    "capture.test_flex": "flex attention called directly, kernels behind transformers' table",
    "capture.test_third_party": "timm, x-transformers, Swin; what BigBird, Longformer report",
    "capture.test_blocks": "attention within blocks: read where blocks and heads can be told apart",
    "capture.test_inputs": "padding, packing, windows, short sequences, caches",
    "capture.test_compile": "torch.compile: whole, in place, per layer, dynamic, broken graphs",
    "capture.test_modes": "checkpointing, autocast, GANs, copies, generate, faults",
    "capture.test_parallel": "DDP, FSDP2, tensor parallel",
    "integration.test_modes": "Lightning: accumulation, L-BFGS, LoRA, changing models, notebooks",
    "distributed.test_lightning": "Lightning on two processes: DDP, spawn, fork, torchrun",
    "distributed.test_reduce": "sums over ranks: uneven batches, ranks without attention",
    "faults.test_lightning": "errors of ours at every stage, errors and interrupts of the user",
    "faults.test_process": "signals, files that may not grow",
    "faults.test_long_run": "200 steps with faults at random, one process and two",
}


@dataclass
class Results:
    """Outcomes of tests.

    Attributes:
        cells: Outcomes per family, implementation and column.
        steps: Whether monitored steps of a compiled model stay compiled.
        unlike: Where the library's eager attention computes other weights: names alone are right.
        files: Passed, failed and skipped tests per test file.
    """

    cells: dict[tuple[str, str, str], list[str]] = field(default_factory=lambda: defaultdict(list))
    steps: dict[tuple[str, str], str] = field(default_factory=dict)
    unlike: set[tuple[str, str]] = field(default_factory=set)
    files: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0]))


def read(paths: list[Path]) -> Results:
    """Collect the outcomes of junit files."""
    results = Results()
    for path in paths:
        for case in ET.parse(path).getroot().iter("testcase"):
            _add(results, case)
    return results


def _add(results: Results, case: ET.Element) -> None:
    file = ".".join(case.get("classname", "").split(".")[-2:])
    test, _, parameters = case.get("name", "").partition("[")
    parameters = parameters.rstrip("]")
    bad = case.find("failure") is not None or case.find("error") is not None
    skipped = case.find("skipped") is not None
    results.files[file][1 if bad else 2 if skipped else 0] += 1
    if skipped or test not in MODEL_TESTS or not file.startswith("capture.test_model"):
        return
    family, _, way = parameters.partition("-")
    way = way or "flex_attention"
    results.cells[family, way, MODEL_TESTS[test]].append(FAILED if bad else PASSED)
    for found in case.iter("property"):
        if found.get("name") == "unlike eager":
            results.unlike.add((family, way))
        if found.get("name") == "steps":
            results.steps[family, way] = found.get("value", "")


def table(results: Results) -> str:
    """The tables in Markdown."""
    columns = ["model", *(way.removesuffix("_attention") for way in WAYS), *MODES]
    lines = [_row(columns), _row(["---"] * len(columns))]
    known = list(TITLES)
    families = {family for family, _, _ in results.cells}
    for family in sorted(families, key=lambda f: known.index(f) if f in known else len(known)):
        numbers = [_mark(results, family, way, "numbers") for way in WAYS]
        modes = [_over_ways(results, family, mode) for mode in MODES]
        lines.append(_row([TITLES.get(family, family), *numbers, *modes]))
    others = [(file, title) for file, title in OTHERS.items() if file in results.files]
    if others:
        lines += ["", _row(["also tested", "passes"]), _row(["---"] * 2)]
    for file, title in others:
        passed, failed, _ = results.files[file]
        lines.append(_row([title, FAILED if failed else PASSED if passed else NOT_RUN]))
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _over_ways(results: Results, family: str, mode: str) -> str:
    """One mark if all implementations agree, otherwise a mark for each."""
    marks = {way: _mark(results, family, way, mode) for way in WAYS}
    marks = {way.removesuffix("_attention"): mark for way, mark in marks.items() if mark}
    if len(set(marks.values())) <= 1:
        return next(iter(marks.values()), NOT_RUN)
    return ", ".join(f"{way} {mark}" for way, mark in marks.items())


def _mark(results: Results, family: str, way: str, column: str) -> str:
    outcomes = results.cells.get((family, way, column))
    if not outcomes:
        return NOT_RUN
    if FAILED in outcomes:
        return FAILED
    if column == "numbers" and (family, way) in results.unlike:
        return "yes (2)"
    if column == "compiled" and results.steps.get((family, way)) == "uncompiled":
        return "yes (1)"
    return PASSED


def insert(readme: Path, text: str) -> None:
    """Put the table between the marks `<!-- support -->` and `<!-- /support -->` of a file."""
    before = readme.read_text(encoding="utf-8")
    marked = re.compile(r"(<!-- support -->\n).*?(<!-- /support -->)", re.DOTALL)
    if not marked.search(before):
        raise SystemExit(
            f"{readme} has no place for the table: <!-- support --> ... <!-- /support -->"
        )
    readme.write_text(marked.sub(lambda m: f"{m[1]}{text}\n{m[2]}", before), encoding="utf-8")


NOTE = """\
(1) Compiled code hides this attention, or computes several kinds of one shape; monitored steps run
uncompiled. Compiled means the whole model with the backend `aot_eager`; `inductor` also fuses
attention that is written out (eager), and (1) holds for it then. (2) Names only: the eager
attention of transformers computes other weights here. Empty: not offered by the library, or not
run; flex attention has no backward pass on a CPU."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("junit", nargs="+", type=Path, help="results of pytest --junitxml")
    parser.add_argument("--insert", type=Path, help="file to put the table into, between its marks")
    options = parser.parse_args()
    results = read(options.junit)
    text = f"{table(results)}\n\n{NOTE}"
    if options.insert:
        insert(options.insert, text)
    else:
        sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
