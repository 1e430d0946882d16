// Plays the policy of the page in its environment.

const ABOUT = JSON.parse(document.getElementById("about").textContent);
const ARRAYS = {
  float32: Float32Array, float64: Float64Array, int64: BigInt64Array, int32: Int32Array, int16: Int16Array,
  int8: Int8Array, uint8: Uint8Array, bool: Uint8Array,
};

async function bytes(id) {  // of a <script> with gzipped base64
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function load() {
  const source = new Blob([await bytes("runtime")], { type: "text/javascript" });
  const ort = await import(URL.createObjectURL(source));
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmBinary = await bytes("wasm");
  const session = await ort.InferenceSession.create(await bytes("model"), { executionProviders: ["wasm"] });
  return { ort, session };
}

class Player {
  constructor({ ort, session }) {
    this.ort = ort;
    this.session = session;
    this.takes = ABOUT.inputs.filter((input) => session.inputNames.includes(input.name));
    this.env = makeEnvironment(ABOUT.page);
    this.begin();
  }
  begin() {
    this.env.reset(Math.random);
    this.first = true;
    this.over = false;
    this.reward = this.total = this.steps = 0;
    this.carry = {};
  }
  tensor(input, values) {
    const size = input.shape.slice(1).reduce((a, b) => a * b, 1);
    const convert = input.dtype === "int64" ? (x) => BigInt(x) : Number;
    const data = ARRAYS[input.dtype].from(values ?? new Array(size).fill(0), convert);
    return new this.ort.Tensor(input.dtype, data, [1, ...input.shape.slice(1)]);
  }
  async step() {
    const seen = { obs: this.env.observe(), is_first: [this.first], reward: [this.first ? 0 : this.reward] };
    const feed = Object.fromEntries(
      this.takes.map((input) => [input.name, this.carry[input.name] ?? this.tensor(input, seen[input.name])]));
    const out = await this.session.run(feed);
    for (const name of Object.keys(out)) if (name.startsWith("next_")) this.carry[name.slice(5)] = out[name];
    const action = Array.from(out.action.data, Number);
    const [reward, terminated] = this.env.step(out.action.dims.length === 1 ? action[0] : action);
    this.reward = reward;
    this.total += reward;
    this.steps += 1;
    this.first = false;
    this.over = terminated || (ABOUT.page.max_episode_steps !== null && this.steps >= ABOUT.page.max_episode_steps);
  }
  async episode() {
    this.begin();
    while (!this.over) await this.step();
    return this.total;
  }
}

function summary(returns) {
  const mean = returns.reduce((a, b) => a + b, 0) / returns.length;
  const std = Math.sqrt(returns.reduce((a, b) => a + (b - mean) ** 2, 0) / returns.length);
  return `${mean.toFixed(2)} ± ${std.toFixed(2)} in ${returns.length} episodes`;
}

async function main() {
  const get = (id) => document.getElementById(id), canvas = get("view"), c = canvas.getContext("2d");
  const runtime = await load();
  const player = new Player(runtime);
  const returns = [];
  let paused = false;
  get("pause").onclick = () => { paused = !paused; get("pause").textContent = paused ? "Play" : "Pause"; };
  get("many").onclick = () => evaluate(100);

  async function evaluate(episodes) {  // with another player: the one on the screen goes on
    const other = new Player(runtime), found = [];
    for (let i = 0; i < episodes; i++) {
      found.push(await other.episode());
      get("result").textContent = summary(found);
    }
    get("result").dataset.returns = JSON.stringify(found);
    return found;
  }

  function draw() {
    c.clearRect(0, 0, canvas.width, canvas.height);
    c.fillStyle = c.strokeStyle = getComputedStyle(document.body).color;
    player.env.draw(c, canvas.width, canvas.height);
    get("now").textContent = `step ${player.steps}, return ${player.total.toFixed(2)}`;
  }

  const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
  get("state").textContent = "";
  const wanted = /episodes=(\d+)/.exec(location.hash);
  if (wanted) await evaluate(Number(wanted[1]));
  for (;;) {
    draw();
    await wait(1000 / (ABOUT.page.fps * Number(get("speed").value)));
    if (paused) continue;
    if (player.over) {
      returns.push(player.total);
      get("past").textContent = summary(returns);
      player.begin();
    } else {
      await player.step();
    }
  }
}

main().catch((error) => { document.getElementById("state").textContent = `This page cannot play: ${error.message}`; });
