// The playground's conversation: its turns, the answer that streams, and where the prompt being typed would go.
// Owns:      the turns; they live as long as the page, in its memory and nowhere else.
// Never:     draws. `onChange` is called at most once a frame.
// Turn:      { rid, user, again, messages, options, status: "waiting" | "streaming" | "done" | "stopped" | "failed", error, answer,
//              arrivals: [[ms after it was sent, length of the answer before, tokens], ...], texts, route, finish, usage, guess, explained }

import { eventsOf, post, routeOf } from "./api.js";
import { getJson } from "./connection.js";

const TYPING_MS = 300;

export class Conversation {
  constructor(onChange) {
    this.onChange = onChange;
    this.turns = [];
    this.system = "";
    this.draft = "";
    this.options = { max_tokens: 120, temperature: 0.7 };
    this.guess = null; // { body } or { error, status, code }: of the draft
    this.needsKey = false;
    this.api = "/";
    this.model = null;
  }

  get running() {
    return this.turns.find((turn) => turn.status === "waiting" || turn.status === "streaming");
  }

  // The messages of the next request: a turn that failed is left out, and one that was asked again with success.
  messages(draft) {
    const next = (at) => this.turns.find((each, i) => i > at && !(each.again && each.status === "failed"));
    const said = this.turns.filter((turn, at) => turn.status !== "failed" && !next(at)?.again);
    return [
      ...(this.system.trim() ? [{ role: "system", content: this.system }] : []),
      ...said.flatMap((turn) => [{ role: "user", content: turn.user }, { role: "assistant", content: turn.answer }]),
      { role: "user", content: draft },
    ];
  }

  body({ messages, options }) {
    return { model: this.model, messages, ...options, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  }

  type(text) {
    this.draft = text;
    clearTimeout(this.timer);
    this.asking?.abort();
    if (text.trim()) this.timer = setTimeout(() => this.explain(), TYPING_MS);
    if (!text.trim() || this.guess?.status === 400) this.guess = null; // another text may be taken
    this.changed();
  }

  // Asks where the draft would go; sends nothing to a replica.
  async explain() {
    const asking = (this.asking = new AbortController());
    const body = { messages: this.messages(this.draft), max_tokens: this.options.max_tokens };
    let guess = null;
    try {
      guess = { body: await (await post(`${this.api}route/explain`, body, asking)).json() };
    } catch (error) {
      if (error.name === "AbortError") return;
      this.refused(error);
      guess = { error: error.message, status: error.status, code: error.code };
    }
    if (asking !== this.asking || !this.draft.trim()) return;
    this.guess = guess;
    this.changed();
  }

  // Sends the draft, or `turn` again as it was. `onFirst(turn)` is called with its first token.
  async send(onFirst, turn = null) {
    const { body: guess } = this.guess ?? {};
    const own = {
      rid: `try-${crypto.getRandomValues(new Uint32Array(1))[0].toString(16).padStart(8, "0")}`,
      user: turn ? turn.user : this.draft,
      again: Boolean(turn),
      messages: turn ? turn.messages : this.messages(this.draft),
      options: { ...this.options },
      status: "waiting",
      version: 0, // of what is shown of it
      answer: "",
      arrivals: [],
      guess: turn ? null : guess,
    };
    this.failure = null;
    if (!turn) this.type("");
    this.turns.push(own);
    this.stopper = new AbortController();
    this.paint(own);
    this.changed();
    try {
      await this.stream(own, this.stopper.signal, onFirst);
      own.status = "done";
    } catch (error) {
      own.status = error.name === "AbortError" ? "stopped" : "failed";
      own.error = error.message;
      this.refused(error);
      if (own.status === "failed" && !own.answer && !turn && !this.draft.trim()) this.takeBack(own); // what was typed meanwhile stays
    }
    this.changed(own);
    if (own.route) await this.lookUp(own);
  }

  async stream(turn, signal, onFirst) {
    const started = performance.now();
    const answer = await post(`${this.api}v1/chat/completions`, this.body(turn), { signal, headers: { "x-request-id": turn.rid } });
    turn.route = routeOf(answer.headers.get("x-manta-route"));
    turn.status = "streaming";
    this.changed(turn);
    onFirst(turn);
    this.lookUp(turn);
    for await (const event of eventsOf(answer)) {
      const before = turn.usage?.completion_tokens ?? 0;
      turn.usage = event.usage ?? turn.usage;
      turn.finish = event.choices[0]?.finish_reason ?? turn.finish;
      const text = event.choices.map((choice) => choice.delta.content ?? "").join("");
      if (!text) continue;
      turn.arrivals.push([performance.now() - started, turn.answer.length, (turn.usage?.completion_tokens ?? 0) - before]);
      turn.answer += text;
      this.changed(turn);
    }
  }

  // The prompt's tokens as texts, to be painted.
  async paint(turn) {
    try {
      const answer = await post(`${this.api}tokenize`, { messages: turn.messages, return_texts: true });
      turn.texts = (await answer.json()).texts;
      this.changed(turn);
    } catch {
      // the answer itself tells what is wrong
    }
  }

  // What the router says of a turn. The observatory is asked by the request's name.
  async lookUp(turn) {
    const found = await getJson(`api/requests/${turn.rid}`).catch(() => null);
    if (!found?.route) return;
    turn.explained = found.route;
    turn.triesAt = found.row?.tries_at;
    this.changed(turn);
  }

  stop() {
    this.stopper?.abort();
  }

  // Begins again before `turn`, whose text is the draft then; without one, anew.
  fork(turn = null) {
    this.stop();
    const at = turn ? this.turns.indexOf(turn) : 0;
    const first = turn?.again ? this.turns.findLastIndex((each, i) => i < at && !each.again) : at;
    this.turns = this.turns.slice(0, first);
    this.failure = null;
    this.type(turn?.user ?? "");
  }

  takeBack(turn) {
    this.turns = this.turns.filter((each) => each !== turn);
    this.failure = turn.error;
    this.type(turn.user);
  }

  refused({ status, code }) {
    if (status === 401 && code === "invalid_api_key") this.needsKey = true;
  }

  changed(turn = null) {
    if (turn) turn.version += 1;
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      this.onChange();
    });
  }
}

// The figures of a turn: what is not known yet is null. Pure.
export function figuresOf({ arrivals, usage, explained, guess, route }) {
  const first = explained?.tries.find((each) => each.actual.ttft_s != null) ?? explained?.tries[0]; // the try that the header tells of
  const chosen = (first ?? guess)?.candidates.find((each) => each.chosen && each.prefill_tokens_per_s);
  const cached = route?.overlap_actual ?? null;
  const [firstAt, lastAt] = [arrivals[0]?.[0], arrivals.at(-1)?.[0]];
  const output = usage?.completion_tokens ?? arrivals.length;
  const load = first?.predicted.load_s ?? 0;
  return {
    ttft: first?.actual.ttft_s ?? (firstAt == null ? null : firstAt / 1e3),
    predicted: (first ?? guess)?.predicted.ttft_s ?? null,
    saved: cached && chosen ? Math.max(0, cached / chosen.prefill_tokens_per_s - load) : 0,
    cached,
    prompt: usage?.prompt_tokens ?? first?.num_tokens ?? guess?.num_tokens ?? null,
    output,
    rate: output > 1 && lastAt > firstAt ? (output - 1) / ((lastAt - firstAt) / 1e3) : null,
  };
}

// An answer's text in pieces, [text, tokens]: one for each event that brought several tokens, of a draft or that a grammar
// forced, and one for all between two of these. Pure.
export function inEvents(text, arrivals) {
  const ends = arrivals.map((_, index) => arrivals[index + 1]?.[1] ?? text.length);
  return arrivals.reduce((made, [, at, tokens], index) => {
    const last = made.at(-1);
    if (tokens <= 1 && last && last[1] <= 1) last[0] += text.slice(at, ends[index]);
    else made.push([text.slice(at, ends[index]), tokens]);
    return made;
  }, []);
}

// Where in an answer another replica went on: { at: characters before, from, how, to }; `how`: what became of `from`.
// `triesAt`: of the request's row. Pure.
export function jumps(arrivals, triesAt) {
  return (triesAt ?? []).slice(1).map((each, before) => {
    const next = arrivals.find(([ms]) => ms >= each.start_s * 1e3);
    const { replica, prefill, failure = null, moved = null } = triesAt[before];
    const from = failure?.startsWith("PrefillLost") ? prefill : replica;
    return { at: next ? next[1] : null, from, how: moved ? "had not begun it" : failure?.startsWith("Overloaded") ? "refused it" : "was lost", to: each.replica };
  });
}
