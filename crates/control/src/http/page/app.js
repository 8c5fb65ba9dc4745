'use strict';

// All texts are set as text, never as HTML.
const COMMANDS = ['configure', 'prepare', 'start', 'pause', 'resume', 'stop', 'reset'];
const KEYS = { c: ['configure'], s: ['start'], p: ['pause', 'resume'], x: ['stop'] };
const SPAN = 120; // seconds of the chart
const at = (id) => document.getElementById(id);
let allowed = [];
let logged = '';
let pictured = 0;
const rates = [];

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

const number = (value) => Math.round(value).toLocaleString('en');

function bytes(value) {
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  const power = value < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log10(value) / 3));
  return `${(value / 1000 ** power).toFixed(power && value / 1000 ** power < 100 ? 1 : 0)} ${units[power]}`;
}

const clock = (time) => time.slice(0, 10) + ' ' + time.slice(11, 19);
const runNumber = (run) => String(run).padStart(6, '0');

function list(id, rows) {
  at(id).replaceChildren(...rows.flatMap(([name, value]) => [element('dt', name), element('dd', value)]));
}

function showRun(status) {
  const run = status.run;
  const last = status.last_run;
  if (run) {
    list('run', [
      ['Number', runNumber(run.number)],
      ['Began', `${clock(run.began)} UTC${run.operator ? ', by ' + run.operator : ''}`],
      ...(run.comment ? [['Comment', run.comment]] : []),
      ['Elapsed', `${run.elapsed_s.toFixed(0)} s`],
      ['Built', `${number(run.events_built)} of ${number(status.configuration ? status.configuration.events : 0)} events`],
      ['Accepted', number(run.events_accepted)],
      ['Incomplete, corrupt', `${number(run.events_incomplete)}, ${number(run.events_corrupt)}`],
      ['Rate', `${number(run.events_per_s)} events/s, ${bytes(run.payload_bytes_per_s)}/s`],
      ['Batches in flight', number(run.batches_assigned - run.batches_done)],
    ]);
  } else if (last) {
    list('run', [
      ['Last run', `${runNumber(last.number)}: ${last.result}`],
      ['Built, stored', `${number(last.events)}, ${number(last.stored_events)} events`],
      ['Time', `${last.duration_s.toFixed(1)} s`],
      ...(last.energy_per_event_j === null ? [] : [['Energy per event', `${last.energy_per_event_j.toPrecision(3)} J`]]),
      ...last.problems.map((problem) => ['Problem', problem]),
    ]);
  } else {
    list('run', [['Last run', 'none']]);
  }
}

function chart() {
  const now = Date.now() / 1000;
  while (rates.length && rates[0][0] < now - SPAN) rates.shift();
  const top = Math.max(1, ...rates.map(([, rate]) => rate));
  const x = (time) => 600 * (1 - (now - time) / SPAN);
  const y = (rate) => 132 - 112 * (rate / top);
  const svg = (name, attributes, text = '') => {
    const made = document.createElementNS('http://www.w3.org/2000/svg', name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    return made;
  };
  const line = rates.map(([time, rate], k) => `${k ? 'L' : 'M'}${x(time).toFixed(1)} ${y(rate).toFixed(1)}`).join('');
  at('chart').replaceChildren(
    svg('line', { x1: 0, x2: 600, y1: 132, y2: 132 }),
    svg('line', { x1: 0, x2: 600, y1: 20, y2: 20 }),
    svg('text', { x: 0, y: 14 }, `${number(top)} events/s`),
    ...(line ? [svg('path', { d: line })] : []),
  );
}

function showUnits(units) {
  at('no-units').hidden = units.length > 0;
  at('units').replaceChildren(...units.map((unit) => {
    const row = document.createElement('tr');
    row.append(
      element('td', unit.name),
      element('td', unit.role),
      element('td', unit.state, { 'data-state': unit.state }),
      element('td', unit.cpu_use === null ? '–' : `${(100 * unit.cpu_use).toFixed(0)} %`, { class: 'number' }),
      element('td', unit.memory_bytes === null ? '–' : bytes(unit.memory_bytes), { class: 'number' }),
    );
    return row;
  }));
}

function entry(time, text) {
  const item = document.createElement('li');
  item.append(element('time', clock(time), { datetime: time }), text);
  return item;
}

function showConfiguration(configuration) {
  list('configuration', configuration ? [
    ['File', configuration.file],
    ['SHA-256', configuration.sha256.slice(0, 16)],
    ...Object.entries(configuration.settings).map(([field, value]) => [field, String(value)]),
    ...configuration.warnings.map((warning) => ['Warning', warning]),
  ] : [['File', 'none; configure first']]);
}

function describe(entry) {
  const by = entry.operator ? ` by ${entry.operator}` : '';
  switch (entry.record) {
    case 'begin': return `run ${runNumber(entry.run)} begins${by}${entry.comment ? ': ' + entry.comment : ''}`;
    case 'end': return `run ${runNumber(entry.run)} ends: ${entry.result}${entry.problems.length ? ': ' + entry.problems[0] : ''}`;
    case 'comment': return `${entry.text}${by}`;
    default: return `run ${runNumber(entry.run)}: ${entry.record}`;
  }
}

async function showLog() {
  const answer = await fetch('/api/v1/log?last=30');
  if (!answer.ok) return;
  const entries = (await answer.json()).entries.reverse();
  at('log').replaceChildren(...entries.map((item) => entry(item.time, describe(item))));
}

function show(status) {
  allowed = status.allowed;
  at('state').textContent = status.state;
  at('state').dataset.state = status.state;
  at('name').textContent = status.configuration ? status.configuration.name : '';
  document.title = `${status.state} – run control`;
  at('software').textContent = status.software;
  for (const button of at('commands').children) button.disabled = !allowed.includes(button.dataset.command);
  showRun(status);
  showUnits(status.units);
  showConfiguration(status.configuration);
  at('no-faults').hidden = status.faults.length > 0;
  at('faults').replaceChildren(...status.faults.slice().reverse().map((fault) =>
    entry(fault.time, `run ${runNumber(fault.run)}: ${fault.text}`)));
  rates.push([Date.now() / 1000, status.run ? status.run.events_per_s : 0]);
  chart();
  if (status.run && Date.now() - pictured > 1500) {
    pictured = Date.now();
    showEvent();
  }
  const seen = `${status.state} ${status.log_entries}`;
  if (seen !== logged) {
    logged = seen;
    showLog();
    showEvent();
  }
}

// Loads the picture beside the shown one, so that it does not flicker.
function showEvent() {
  if (document.hidden) return;
  const next = new Image();
  next.addEventListener('load', () => {
    at('event').src = next.src;
    at('event').hidden = false;
    at('no-event').hidden = true;
  });
  next.src = `/api/v1/display?at=${Date.now()}`;
}

function answer(text, kind) {
  at('answer').textContent = text;
  at('answer').dataset.kind = kind;
}

function authorization() {
  const token = at('token').value.trim();
  return token ? { Authorization: `Bearer ${token}` } : {};
}

async function give(command) {
  // Over TLS the browser's certificate permits commands.
  if (!at('token').value && location.protocol !== 'https:') {
    answer('Enter the token first: the content of run control’s token file.', 'error');
    at('token').focus();
    return;
  }
  answer(`${command} …`, 'info');
  try {
    const response = await fetch(`/api/v1/${command}`, {
      method: 'POST',
      headers: { ...authorization(), 'Content-Type': 'application/json' },
      body: JSON.stringify({ operator: 'page', comment: at('comment').value }),
    });
    const body = await response.json();
    if (!response.ok) return answer(body.error, 'error');
    answer(`${command}: done`, 'info');
    show(body);
  } catch (error) {
    answer(`${command}: run control cannot be reached`, 'error');
  }
}

for (const command of COMMANDS) {
  const button = element('button', command, { type: 'button', 'data-command': command });
  button.disabled = true;
  button.addEventListener('click', () => give(command));
  at('commands').append(button);
}
at('token-form').addEventListener('submit', (event) => event.preventDefault());
document.addEventListener('keydown', (event) => {
  if (event.target instanceof HTMLInputElement || event.ctrlKey || event.altKey || event.metaKey) return;
  const command = (KEYS[event.key] || []).find((name) => allowed.includes(name));
  if (!command) return;
  // Else the key is typed into the token's field if that gets the focus.
  event.preventDefault();
  give(command);
});
const events = new EventSource('/api/v1/events');
events.addEventListener('status', (event) => {
  at('connection').hidden = true;
  show(JSON.parse(event.data));
});
events.addEventListener('error', () => { at('connection').hidden = false; });
setInterval(chart, 1000);
