"""How fast the Attention tab is: a small model against 100 layers x 128 heads, each with 200 steps.

Run by hand: python tests/benchmarks/bench_dashboard.py [--loader python]
Prints writing time, size of the log, page ready, size and time of each answer, and how long the
page needs after a move of the slider until it has been painted.
"""

import argparse
import importlib.util
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

HELPERS = Path(__file__).resolve().parents[1] / "tensorboard_plugin"
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic"]
STEPS = 200
# Two frames after the event the new picture is on the screen.
SLIDE = """async () => {
  const slider = document.querySelector('#em-step');
  const times = [];
  for (let i = 0; i < 30; i += 1) {
    const start = performance.now();
    slider.value = String((i * 37) % 200);
    slider.dispatchEvent(new Event('input'));
    const script = performance.now() - start;
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    times.push([script, performance.now() - start]);
  }
  return times;
}"""


def load(name):
    spec = importlib.util.spec_from_file_location(f"bench_{name}", HELPERS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answers(server):
    """Time and size of every answer; the first one reads the run."""
    for route in (
        "runs",
        "attribution?run=run",
        "frames?run=run&stat=sink_mass",
        "frames?run=run&stat=change_sink",
        "series?run=run&layer=0&head=0",
        "alerts?run=run",
    ):
        start = time.perf_counter()
        status, body, _ = server.get(route)
        spent = time.perf_counter() - start
        yield route, status, len(body), spent


def page_ready(chromium, server):
    context = chromium.new_context(viewport={"width": 1600, "height": 1000})
    page = context.new_page()
    start = time.perf_counter()
    page.goto(f"{server.url}/data/plugin_entry.html?name=entropy_monitor")
    page.wait_for_selector("#em-root[data-state=ready]", timeout=120_000)
    page.wait_for_function(
        "() => document.querySelector('#em-cell').textContent.includes('Sink mass 0')"
    )
    return page, context, time.perf_counter() - start


def measure(chromium, layers, heads, loader, synthetic, serving):
    names = synthetic.plain_layers(layers, heads)
    with tempfile.TemporaryDirectory() as folder:
        log = synthetic.EventLog(Path(folder) / "log" / "run")
        emissions = [synthetic.emission(names, step, STEPS - 1) for step in range(STEPS)]
        spent = []
        for one in emissions:
            start = time.perf_counter()
            log.summary(synthetic.heads_summary(one), step=one.step)
            spent.append(time.perf_counter() - start)
        log.close()
        del emissions
        size = sum(
            file.stat().st_size for file in (Path(folder) / "log").rglob("*") if file.is_file()
        )
        print(f"\n{layers} layers x {heads} heads x {STEPS} steps, {loader} loader")
        print(
            f"  build and queue one step {statistics.median(spent) * 1e3:8.1f} ms   "
            f"log {size / 1e6:.1f} MB"
        )
        # TensorBoard's Python loader checks every byte in Python: minutes for a large log.
        with serving.tensorboard(
            Path(folder) / "log",
            folder,
            loader,
            ready=serving.has_step("run", STEPS - 1),
            seconds=900,
        ) as server:
            page, context, first = page_ready(chromium, server)
            context.close()
            start = time.perf_counter()
            server.wait(lambda one: not one.runs()["run"]["loading"])
            print(f"  all steps read after      {(time.perf_counter() - start) * 1e3:8.0f} ms more")
            page, context, again = page_ready(chromium, server)
            print(f"  page ready, first visit  {first * 1e3:8.0f} ms   again {again * 1e3:.0f} ms")
            times = page.evaluate(SLIDE)
            script, painted = (sorted(one[k] for one in times) for k in (0, 1))
            print(
                f"  slider: script median {statistics.median(script):.1f} ms, "
                f"worst {script[-1]:.1f}; "
                f"painted median {statistics.median(painted):.1f} ms, worst {painted[-1]:.1f}"
            )
            context.close()
            for route, status, length, spent_on in answers(server):
                print(f"  {route:36s} {status} {length / 1e6:8.3f} MB {spent_on * 1e3:8.1f} ms")
        return first, again


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loader", default="rust", choices=["rust", "python"])
    chosen = parser.parse_args()
    from playwright.sync_api import sync_playwright

    synthetic, serving = load("synthetic"), load("serving")
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before this"
    )
    with sync_playwright() as playwright:
        path = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        chromium = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        small = measure(chromium, 24, 16, chosen.loader, synthetic, serving)
        large = measure(chromium, 100, 128, chosen.loader, synthetic, serving)
        print(
            f"\nlarge/small: first visit {large[0] / small[0]:.2f}, again {large[1] / small[1]:.2f}"
        )
        chromium.close()


if __name__ == "__main__":
    main()
