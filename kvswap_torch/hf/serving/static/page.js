"use strict";
// A server's page: it asks this server alone, with the key that was typed in.

const at = (id) => document.getElementById(id);
const texts = new Map();  // of documents: what a question about one begins with
let model = "", saidBy = "user", asking = null;

function headers() {
  const key = sessionStorage.getItem("key");
  return key ? {Authorization: `Bearer ${key}`} : {};
}

async function get(path) {
  return whole(await fetch(path, {headers: headers()}));
}

function post(path, body, signal) {
  const given = {"Content-Type": "application/json", ...headers()};
  return fetch(path, {method: "POST", headers: given, body: JSON.stringify(body), signal});
}

async function whole(reply) {
  at("key-form").hidden = reply.status !== 401 && at("key-form").hidden;
  if (reply.ok) {
    return reply;
  }
  const said = await reply.text();
  let message = said;
  try {
    message = JSON.parse(said).error.message;
  } catch {
    // not of this server: shown as it is
  }
  throw new Error(message);
}

// What a stream's events say, one after the other.
async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) {
      return;
    }
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) {
        yield JSON.parse(line.slice(6));
      }
    }
  }
}

function bytes(count) {
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (count >= 1024 && i < names.length - 1) {
    count /= 1024;
    i += 1;
  }
  return `${count.toFixed(i && count < 100 ? 1 : 0)} ${names[i]}`;
}

function say(id, text, isWrong = false) {
  at(id).textContent = text;
  at(id).classList.toggle("wrong", isWrong);
}

function cell(row, text, kind = "") {
  const made = row.insertCell();
  made.textContent = text;
  made.className = kind;
}

async function listDocuments() {
  const {documents, said_by: by} = await (await get("v1/kvswap/documents")).json();
  saidBy = by;
  at("documents").replaceChildren();
  const chosen = at("document").value;
  at("document").replaceChildren(new Option("no document", ""));
  for (const each of documents) {
    const row = at("documents").insertRow();
    const title = each.document || each.begins || each.name;
    cell(row, title);
    if (title !== each.name) {
      const file = document.createElement("small");
      file.textContent = each.name;
      row.cells[0].append(file);
    }
    cell(row, each.tokens.toLocaleString("en"), "n");
    cell(row, bytes(each.bytes), "n");
    cell(row, new Date(each.used * 1000).toLocaleString("en-GB"));
    const tokens = `${each.tokens.toLocaleString("en")} tokens`;
    at("document").add(new Option(`${title}, ${tokens}`, each.name));
  }
  at("document").value = documents.some((each) => each.name === chosen) ? chosen : "";
  at("no-documents").hidden = documents.length > 0;
}

async function textOf(name) {
  if (!texts.has(name)) {
    const path = `v1/kvswap/documents/${encodeURIComponent(name)}`;
    texts.set(name, (await (await get(path)).json()).text);
  }
  return texts.get(name);
}

at("ingest").addEventListener("submit", async (event) => {
  event.preventDefault();
  const [file] = at("file").files;
  at("bar").hidden = false;
  at("bar").value = 0;
  say("bar-text", "sent");
  try {
    const text = await file.text();
    const reply = await whole(await post("v1/kvswap/ingest", {text}));
    for await (const told of events(reply)) {
      if (told.error) {
        throw new Error(told.error.message);
      }
      at("bar").max = told.of;
      at("bar").value = told.read;
      say("bar-text", `${told.read.toLocaleString("en")} of ${told.of.toLocaleString("en")} tokens`);
      if (told.name) {
        texts.set(told.name, text);
        await listDocuments();
        at("document").value = told.name;
        say("bar-text", `${told.of.toLocaleString("en")} tokens in ${told.seconds} s, ` +
          `${told.cached.toLocaleString("en")} of them from a cache: ${told.name}`);
      }
    }
  } catch (error) {
    say("bar-text", error.message, true);
  }
});

at("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  asking = new AbortController();
  at("send").disabled = true;
  at("stop").disabled = false;
  say("answer", "");
  say("reused", "");
  const began = performance.now();
  let first = 0, usage = null;
  try {
    const name = at("document").value;
    const question = at("question").value;
    const book = name ? await textOf(name) : "";
    let messages = [{role: "user", content: book ? `${book}\n\n${question}` : question}];
    if (book && saidBy === "system") {
      messages = [{role: "system", content: book}, {role: "user", content: question}];
    }
    const body = {
      model, stream: true, stream_options: {include_usage: true},
      max_tokens: Number(at("most").value), messages,
    };
    const reply = await whole(await post("v1/chat/completions", body, asking.signal));
    for await (const told of events(reply)) {
      if (told.error) {
        throw new Error(told.error.message);
      }
      const piece = told.choices[0]?.delta?.content;
      if (piece) {
        first ||= performance.now() - began;
        at("answer").append(piece);
      }
      usage = told.usage ?? usage;
    }
    if (usage) {
      const cached = usage.prompt_tokens_details.cached_tokens;
      const share = Math.round(100 * cached / usage.prompt_tokens);
      say("reused", `${usage.prompt_tokens.toLocaleString("en")} tokens, ` +
        `${cached.toLocaleString("en")} (${share} %) from a cache; first piece after ` +
        `${(first / 1000).toFixed(2)} s, ${usage.completion_tokens} tokens in ` +
        `${((performance.now() - began) / 1000).toFixed(2)} s`);
    }
    await listDocuments();
  } catch (error) {
    say("reused", error.name === "AbortError" ? "stopped" : error.message, error.name !== "AbortError");
  } finally {
    at("send").disabled = false;
    at("stop").disabled = true;
  }
});

at("stop").addEventListener("click", () => asking?.abort());

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", at("key").value);
  at("key-form").hidden = true;
  begin();
});

const GAUGES = [
  ["memory of the process", "kvswap_resident_bytes", bytes],
  ["read from the disk", "kvswap_read_bytes_total", bytes],
  ["written to the disk", "kvswap_written_bytes_total", bytes],
  ["the store takes", "kvswap_store_bytes", bytes],
  ["requests that went on from a cache", "kvswap_hits_total", String],
  ["requests that began with nothing", "kvswap_misses_total", String],
  ["tokens of prompts from a cache", "kvswap_cached_tokens_total", String],
  ["tokens of answers", "kvswap_generated_tokens_total", String],
  ["requests that run", "kvswap_running", String],
  ["requests that wait", "kvswap_waiting", String],
];

async function showGauges() {
  const found = new Map();
  for (const line of (await (await get("metrics")).text()).split("\n")) {
    const [name, value] = line.split(" ");
    found.set(name, Number(value));
  }
  at("gauges").replaceChildren(...GAUGES.map(([label, name, form]) => {
    const pair = document.createElement("div");
    const term = document.createElement("dt");
    const value = document.createElement("dd");
    term.textContent = label;
    value.textContent = form(found.get(name) ?? 0);
    value.id = name;
    pair.append(term, value);
    return pair;
  }));
}

async function begin() {
  try {
    const models = await (await get("v1/models")).json();
    model = models.data[0].id;
    say("model", model);
    await listDocuments();
    await showGauges();
  } catch (error) {
    say("reused", error.message, true);
  }
}

setInterval(() => {
  if (model && !document.hidden) {
    showGauges().catch(() => {});
  }
}, 2000);
begin();
