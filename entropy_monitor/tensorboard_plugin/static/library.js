// Answers by key, with what is loading and what failed. A run's version changes when it has new steps: its answers
// are asked for again then, and the old ones stay on the page until the new ones are there.

const MAX_ANSWERS = 24;

export function makeLibrary(source, onChange) {
  const answers = new Map();
  let runs = null;
  let problem = null;
  let refreshing = null;

  function versionOf(name) {
    const run = (runs || []).find((one) => one.name === name);
    return run ? JSON.stringify(run.version) : "gone";
  }

  function load(key, entry, kind, name, args) {
    const version = versionOf(name);
    entry.loading = true;
    source[kind](name, ...args).then(
      (value) => Object.assign(entry, { value, error: null }),
      (error) => Object.assign(entry, { error: error.message || String(error) }),
    ).then(() => {
      Object.assign(entry, { version, loading: false });
      if (answers.get(key) === entry) onChange();
    });
  }

  async function refresh() {
    try {
      runs = await source.runs();
      problem = null;
    } catch (error) {
      problem = error.message || String(error);
    }
    onChange();
  }

  return {
    get runs() {
      return runs;
    },
    get problem() {
      return problem;
    },
    run: (name) => (runs || []).find((one) => one.name === name) || null,
    refresh() {
      refreshing = refreshing || refresh().finally(() => (refreshing = null));
      return refreshing;
    },
    // Forget failures, so that the next look tries again.
    retry() {
      for (const entry of answers.values()) if (entry.error) entry.version = null;
    },
    // {value, error, loading}: value may be of an older version while loading.
    get(kind, name, ...args) {
      const key = JSON.stringify([kind, name, ...args]);
      let entry = answers.get(key);
      if (!entry) {
        entry = { value: null, error: null, loading: false, version: null };
        answers.set(key, entry);
        if (answers.size > MAX_ANSWERS) answers.delete(answers.keys().next().value);
      } else {
        answers.delete(key); // most recently used last
        answers.set(key, entry);
      }
      const version = versionOf(name);
      if (version !== "gone" && entry.version !== version && !entry.loading) load(key, entry, kind, name, args);
      return entry;
    },
  };
}

// Position of the last recorded step that is not after `step`; the first one if there is none.
export function positionOf(steps, step) {
  if (step === null) return steps.length - 1;
  let low = 0;
  let high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle + 1;
    else high = middle;
  }
  return Math.max(0, low - 1);
}
