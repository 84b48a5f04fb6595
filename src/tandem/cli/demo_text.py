"""What `tandem demo` asks: long enough that handing the prompt off is worth it."""

TASK = "Summarise this text in one sentence."
TEXT = """\
A language model works in two phases. First it reads the prompt: all of its tokens pass through the network at \
once, and for every layer the keys and values of every token are kept, so that later tokens can look back at \
them. This is called prefill. It is limited by how fast the machine multiplies matrices. Then the model writes \
the answer, one token after the other. This is called decode. For each token all weights have to be read from \
memory once, while little is computed, so that it is limited by how fast the machine's memory is. Few machines \
are good at both. A graphics card or a small computer with a strong accelerator computes much, but its memory \
may be slow or small. A desktop computer with wide, fast memory writes quickly, but a long prompt keeps it busy \
for minutes before the first word of the answer appears. If both stand on the same desk, each can do what it is \
good at: the first machine reads the prompt, and the second one writes the answer. What has to travel between \
them is the cache of keys and values. It is large, some ten or hundred kilobytes for each token, but it need not \
travel at the end. While the first machine computes the next part of the prompt, the part before it is already \
on its way over the network. If the network is fast enough, the second machine begins to write almost at the \
moment in which the first one has finished reading. The answer is the same, token for token, as if one machine \
had done everything; only the waiting is shorter. When the first machine is switched off in the middle of a \
prompt, the second one keeps what has arrived, and reads the rest by itself."""
QUESTION = f"{TASK}\n\n{TEXT}"
