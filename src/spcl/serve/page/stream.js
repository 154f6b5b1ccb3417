// Server-sent events by fetch, which unlike EventSource can send a token

async function* messages(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const fields = Object.fromEntries(part.split("\n").filter((line) => !line.startsWith(":")).map((line) => {
        const colon = line.indexOf(": ");
        return [line.slice(0, colon), line.slice(colon + 2)];
      }));
      if (fields.data) yield [fields.event ?? "message", JSON.parse(fields.data)];
    }
  }
}

const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, seconds * 1000));

// Follow the events for ever: connect again where the connection ends, and ask for a token where one is needed.
export async function follow(path, { token, askToken, onState, onOpen, onMessage }) {
  for (;;) {
    try {
      const headers = token() ? { Authorization: `Bearer ${token()}` } : {};
      const response = await fetch(path, { headers, cache: "no-store" });
      if (response.status === 401) {
        onState("waiting", "needs a token");
        await askToken();
        continue;
      }
      if (!response.ok) throw new Error(`status ${response.status}`);
      onOpen();
      onState("live", "live");
      for await (const [name, data] of messages(response)) onMessage(name, data);
    } catch (error) {
      console.info(`events: ${error.message}`);
    }
    onState("lost", "not connected, trying again");
    await pause(2);
  }
}
