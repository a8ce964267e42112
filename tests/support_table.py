"""Print what is supported, from the results of the tests: it cannot claim more than they show.

    pytest tests/capture -m "slow or not slow" --junitxml=support.xml
    python -m tests.support_table support.xml

Rows are model families, columns are attention implementations and ways of running them. A mark is
printed only for tests that ran and passed; a family that was skipped or not run stays empty.
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
    "deepseek_v3": "DeepSeek-V3 (MLA, MoE)",
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
COLUMNS = ("numbers", "same training", "compiled", "checkpointed", "bf16")

OTHERS = {
    "test_torch_modules": "torch.nn: MultiheadAttention, TransformerEncoder/Decoder, fast path",
    "test_handmade": "written by hand: matmul, einsum, folded, masks of -1e9, -1e4, -inf",
    "test_fused": "kernels of F.scaled_dot_product_attention, flash-attn operations",
    "test_flex": "flex attention called directly, kernels behind transformers' table",
    "test_third_party": "timm, x-transformers; what BigBird, Longformer report",
    "test_inputs": "padding, packing, windows, short sequences, caches",
    "test_compile": "torch.compile: whole, in place, per layer, dynamic, broken graphs",
    "test_modes": "checkpointing, autocast, GANs, LoRA, copies, generate, faults",
    "test_parallel": "DDP, FSDP2, tensor parallel",
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
    file = case.get("classname", "").rsplit(".", 1)[-1]
    test, _, parameters = case.get("name", "").partition("[")
    parameters = parameters.rstrip("]")
    bad = case.find("failure") is not None or case.find("error") is not None
    skipped = case.find("skipped") is not None
    results.files[file][1 if bad else 2 if skipped else 0] += 1
    if file not in ("test_model_matrix", "test_model_modes") or test not in MODEL_TESTS or skipped:
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
    lines = [
        "| model | attention | " + " | ".join(COLUMNS) + " |",
        "|---|---|" + "---|" * len(COLUMNS),
    ]
    rows = sorted({(family, way) for family, way, _ in results.cells}, key=_place)
    for family, way in rows:
        marks = [_mark(results, family, way, column) for column in COLUMNS]
        name = TITLES.get(family, family)
        lines.append(f"| {name} | {way.removesuffix('_attention')} | {' | '.join(marks)} |")
    lines += ["", "| also tested | passed | failed | skipped |", "|---|---|---|---|"]
    for file, title in OTHERS.items():
        if file in results.files:
            lines.append(f"| {title} | {' | '.join(map(str, results.files[file]))} |")
    return "\n".join(lines)


def _place(row: tuple[str, str]) -> tuple[int, str, str]:
    family, way = row
    known = list(TITLES)
    return known.index(family) if family in known else len(known), family, way


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
uncompiled. Compiled means the whole model with the backend aot_eager; inductor also fuses attention
that is written out (eager), and (1) holds for it then. (2) Names only: eager attention of
transformers computes other weights here. Empty: not offered by the library, or not run."""


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
