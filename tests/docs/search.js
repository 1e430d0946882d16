// Answer queries as the search of the site does: node search.js <site folder> <query> ...
// Prints a list of pages for each query, best first, and the best section of each.
const fs = require("fs"), path = require("path"), vm = require("vm")
const [site, ...queries] = process.argv.slice(2)
const workers = path.join(site, "assets", "javascripts", "workers")
const code = fs.readFileSync(path.join(workers, fs.readdirSync(workers).find((name) => /^search\..*\.js$/.test(name))), "utf-8")
const {config, docs} = JSON.parse(fs.readFileSync(path.join(site, "search", "search_index.json"), "utf-8"))

let receive, answer
const self = {console, postMessage: (message) => answer(message), addEventListener: (kind, listener) => { receive = listener }}
self.self = self
vm.runInContext(code, vm.createContext(self))
const ask = (data) => new Promise((resolve) => { answer = resolve; receive({data}) })

;(async () => {
  await ask({type: 0, data: {config, docs, options: {suggest: false}}})
  const found = {}
  for (const query of queries) {
    const {data} = await ask({type: 2, data: query})
    found[query] = data.items.map((sections) => sections[0].location)
  }
  console.log(JSON.stringify(found))
})()
