// Environments of Gymnasium: the same dynamics, rewards and ends, in double precision.
//
// makeEnvironment(about) returns {reset(random), step(action) -> [reward, terminated], observe() -> [numbers], draw(...)}.
// `about` has the id of the environment, what its constructor was given, and the elements of the observation to keep.
// `random` returns a number in [0, 1). `state` may be set.

const uniform = (random, low, high) => low + (high - low) * random();
const clip = (x, low, high) => Math.min(Math.max(x, low), high);
const TAU = 2 * Math.PI;

class CartPole {
  constructor({ sutton_barto_reward = false }) { this.sutton = sutton_barto_reward; }
  reset(random) { this.state = [0, 0, 0, 0].map(() => uniform(random, -0.05, 0.05)); }
  observe() { return this.state; }
  step(action) {
    let [x, xDot, theta, thetaDot] = this.state;
    const force = action === 1 ? 10 : -10, cos = Math.cos(theta), sin = Math.sin(theta);
    const total = 0.1 + 1.0, poleLength = 0.1 * 0.5;
    const temp = (force + poleLength * thetaDot * thetaDot * sin) / total;
    const thetaAcc = (9.8 * sin - cos * temp) / (0.5 * (4.0 / 3.0 - 0.1 * cos * cos / total));
    const xAcc = temp - poleLength * thetaAcc * cos / total;
    x += 0.02 * xDot; xDot += 0.02 * xAcc; theta += 0.02 * thetaDot; thetaDot += 0.02 * thetaAcc;
    this.state = [x, xDot, theta, thetaDot];
    const limit = 12 * 2 * Math.PI / 360;
    const terminated = x < -2.4 || x > 2.4 || theta < -limit || theta > limit;
    return [this.sutton ? (terminated ? -1 : 0) : 1, terminated];
  }
  draw(c, w, h) {
    const scale = w / 4.8, x = w / 2 + this.state[0] * scale, y = h * 0.75;
    line(c, 0, y, w, y, 1);
    c.fillRect(x - 25, y - 15, 50, 30);
    line(c, x, y - 10, x + Math.sin(this.state[2]) * scale, y - 10 - Math.cos(this.state[2]) * scale, 8, ACCENT);
  }
}

class Pendulum {
  constructor({ g = 10 }) { this.g = g; this.torque = 0; }
  reset(random) { this.state = [uniform(random, -Math.PI, Math.PI), uniform(random, -1, 1)]; this.torque = 0; }
  observe() { return [Math.cos(this.state[0]), Math.sin(this.state[0]), this.state[1]]; }
  step(action) {
    const [theta, speed] = this.state, u = clip(action[0], -2, 2);
    const angle = ((theta + Math.PI) % TAU + TAU) % TAU - Math.PI;
    const cost = angle * angle + 0.1 * speed * speed + 0.001 * u * u;
    const next = clip(speed + (3 * this.g / 2 * Math.sin(theta) + 3 * u) * 0.05, -8, 8);
    this.state = [theta + next * 0.05, next];
    this.torque = u;
    return [-cost, false];
  }
  draw(c, w, h) {
    const x = w / 2, y = h / 2, length = h * 0.4, theta = this.state[0];
    line(c, x, y, x - Math.sin(theta) * length, y - Math.cos(theta) * length, 16, ACCENT);
    circle(c, x, y, 6);
    line(c, x - 60, h - 12, x + 60, h - 12, 1);
    line(c, x, h - 12, x - this.torque * 30, h - 12, 6);
  }
}

class MountainCar {
  constructor({ goal_velocity = 0 }) { this.goalVelocity = goal_velocity; this.goal = 0.5; }
  reset(random) { this.state = [uniform(random, -0.6, -0.4), 0]; }
  observe() { return this.state; }
  step(action) {
    let [position, velocity] = this.state;
    velocity = clip(velocity + (action - 1) * 0.001 + Math.cos(3 * position) * -0.0025, -0.07, 0.07);
    position = clip(position + velocity, -1.2, 0.6);
    if (position === -1.2 && velocity < 0) velocity = 0;
    this.state = [position, velocity];
    return [-1, position >= this.goal && velocity >= this.goalVelocity];
  }
  draw(c, w, h) {
    const at = (x) => [(x + 1.2) / 1.8 * w, h * 0.9 - (Math.sin(3 * x) * 0.45 + 0.55) * h * 0.7];
    c.beginPath();
    for (let x = -1.2; x <= 0.6; x += 0.02) c.lineTo(...at(x));
    c.stroke();
    const [x, y] = at(this.state[0]), [goalX, goalY] = at(this.goal);
    circle(c, x, y - 10, 10, ACCENT);
    line(c, goalX, goalY, goalX, goalY - 40, 3);
  }
}

class MountainCarContinuous extends MountainCar {
  constructor(given) { super(given); this.goal = 0.45; }
  step(action) {
    let [position, velocity] = this.state;
    velocity = clip(velocity + clip(action[0], -1, 1) * 0.0015 - 0.0025 * Math.cos(3 * position), -0.07, 0.07);
    position = clip(position + velocity, -1.2, 0.6);
    if (position === -1.2 && velocity < 0) velocity = 0;
    const terminated = position >= this.goal && velocity >= this.goalVelocity;
    this.state = [Math.fround(position), Math.fround(velocity)];  // Gymnasium keeps them in single precision
    return [(terminated ? 100 : 0) - 0.1 * action[0] * action[0], terminated];
  }
}

class Acrobot {
  reset(random) { this.state = [0, 0, 0, 0].map(() => Math.fround(uniform(random, -0.1, 0.1))); }
  observe() {
    const [a, b, da, db] = this.state;
    return [Math.cos(a), Math.sin(a), Math.cos(b), Math.sin(b), da, db];
  }
  step(action) {
    const torque = action - 1, dt = 0.2, y = this.state;
    const add = (k, factor) => y.map((x, i) => x + factor * k[i]);
    const k1 = this.slope(y, torque), k2 = this.slope(add(k1, dt / 2), torque);
    const k3 = this.slope(add(k2, dt / 2), torque), k4 = this.slope(add(k3, dt), torque);
    const next = y.map((x, i) => x + dt / 6 * (k1[i] + 2 * k2[i] + 2 * k3[i] + k4[i]));
    for (const i of [0, 1]) {
      while (next[i] > Math.PI) next[i] -= TAU;
      while (next[i] < -Math.PI) next[i] += TAU;
    }
    next[2] = clip(next[2], -4 * Math.PI, 4 * Math.PI);
    next[3] = clip(next[3], -9 * Math.PI, 9 * Math.PI);
    this.state = next;
    const terminated = -Math.cos(next[0]) - Math.cos(next[1] + next[0]) > 1;
    return [terminated ? 0 : -1, terminated];
  }
  slope([a, b, da, db], torque) {
    const g = 9.8, l = 0.5;
    const d1 = l * l + (1 + l * l + 2 * l * Math.cos(b)) + 2, d2 = l * l + l * Math.cos(b) + 1;
    const phi2 = l * g * Math.cos(a + b - Math.PI / 2);
    const phi1 = -l * db * db * Math.sin(b) - 2 * l * db * da * Math.sin(b) + (l + 1) * g * Math.cos(a - Math.PI / 2) + phi2;
    const ddb = (torque + d2 / d1 * phi1 - l * da * da * Math.sin(b) - phi2) / (l * l + 1 - d2 * d2 / d1);
    return [da, db, -(d2 * ddb + phi1) / d1, ddb];
  }
  draw(c, w, h) {
    const length = h * 0.22, [a, b] = this.state, x = w / 2, y = h / 2;
    const x1 = x + Math.sin(a) * length, y1 = y + Math.cos(a) * length;
    line(c, 0, y - length, w, y - length, 1);
    line(c, x, y, x1, y1, 10);
    line(c, x1, y1, x1 + Math.sin(a + b) * length, y1 + Math.cos(a + b) * length, 10, ACCENT);
  }
}

class Grid {  // transitions[state][action] = [[probability, next state, reward, terminated], ...]
  constructor({ transitions, start, rows, columns, letters }) {
    Object.assign(this, { transitions, start, rows, columns, letters });
  }
  reset(random) { this.random = random; this.state = this.drawn(this.start); }
  observe() { return [this.state]; }
  drawn(probabilities) {
    const u = this.random();
    let sum = 0;
    for (let i = 0; i < probabilities.length; i++) if ((sum += probabilities[i]) > u) return i;
    return probabilities.length - 1;
  }
  step(action) {
    const choices = this.transitions[this.state][action];
    const [, state, reward, terminated] = choices[this.drawn(choices.map((choice) => choice[0]))];
    this.state = state;
    return [reward, terminated];
  }
  draw(c, w, h) {
    const side = Math.min(w / this.columns, h / this.rows), left = (w - side * this.columns) / 2;
    c.textAlign = "center";
    c.textBaseline = "middle";
    c.font = `${Math.floor(side * 0.4)}px sans-serif`;
    for (let i = 0; i < this.rows * this.columns; i++) {
      const x = left + (i % this.columns) * side, y = Math.floor(i / this.columns) * side;
      c.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
      if ("HC".includes(this.letters[i])) { c.globalAlpha = 0.35; c.fillRect(x + 2, y + 2, side - 4, side - 4); c.globalAlpha = 1; }
      if ("SG".includes(this.letters[i])) c.fillText(this.letters[i], x + side / 2, y + side / 2);
      if (i === this.state) circle(c, x + side / 2, y + side / 2, side * 0.3, ACCENT);
    }
  }
}

const ACCENT = "#d9534f";

function line(c, x1, y1, x2, y2, width, color) {
  c.save();
  if (color) c.strokeStyle = color;
  c.lineWidth = width;
  c.lineCap = "round";
  c.beginPath();
  c.moveTo(x1, y1);
  c.lineTo(x2, y2);
  c.stroke();
  c.restore();
}

function circle(c, x, y, radius, color) {
  c.save();
  if (color) c.fillStyle = color;
  c.beginPath();
  c.arc(x, y, radius, 0, TAU);
  c.fill();
  c.restore();
}

const ENVIRONMENTS = { CartPole, Pendulum, MountainCar, MountainCarContinuous, Acrobot, Grid };

function makeEnvironment(about) {
  const env = new ENVIRONMENTS[about.class](about.parameters);
  if (about.select) {
    const whole = env.observe.bind(env);
    env.observe = () => { const seen = whole(); return about.select.map((i) => seen[i]); };
  }
  return env;
}
