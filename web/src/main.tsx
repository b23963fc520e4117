import { render } from "preact";
import { App } from "./app";
import { decode, Unreadable } from "./data";
import { Failure } from "./failure";
import "./style.css";
import "./panels.css";

async function start(): Promise<void> {
  const place = document.getElementById("app")!;
  const data = document.getElementById("gradtrace-data");
  try {
    const report = await decode(data?.textContent ?? "");
    data?.remove(); // megabytes of text that nobody needs again
    render(<App report={report} />, place);
  } catch (error) {
    if (!(error instanceof Unreadable)) throw error;
    render(<Failure reason={error.reason} detail={error.message} />, place);
  }
}

void start();
