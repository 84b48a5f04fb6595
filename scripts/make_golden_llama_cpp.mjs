// Token ids as llama.cpp gives them, for tests/models/golden; `make_golden_gguf.py` merges them in.
//
//   npm install --ignore-scripts node-llama-cpp@3.22.1 @node-llama-cpp/linux-x64@3.22.1
//   node make_golden_llama_cpp.mjs MODEL.gguf TEXTS.json OUT.json      (in the folder with that node_modules)
//
// Special tokens are recognised in a text, none is added to it.
import fs from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";

const library = path.join(process.cwd(), "node_modules", "node-llama-cpp");
const { getLlama } = await import(pathToFileURL(path.join(library, "dist", "index.js")));
const version = JSON.parse(fs.readFileSync(path.join(library, "package.json"), "utf8")).version;

const [modelPath, textsPath, outPath] = process.argv.slice(2);
const texts = JSON.parse(fs.readFileSync(textsPath, "utf8"));
const llama = await getLlama({ gpu: false, build: "never", maxThreads: 1 });
const model = await llama.loadModel({ modelPath, vocabOnly: true });
const ids = texts.map((text) => Array.from(model.tokenize(text, true)));
fs.writeFileSync(outPath, JSON.stringify({ reader: `llama.cpp, node-llama-cpp ${version}`, ids }));
await model.dispose();
process.exit(0);
