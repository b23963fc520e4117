/** What is shown where there is no report to show. */
import type { Reason } from "./data";

const texts: Record<Reason, { title: string; text: string; remedy: string }> = {
  empty: {
    title: "There is no report in this file",
    text: "This is the page that gradtrace fills with data; nobody has filled this copy.",
    remedy: "Write a report with trace.report(\"report.html\").",
  },
  damaged: {
    title: "This report is damaged",
    text: "Its data cannot be read. The file may have been cut off on its way, or changed by a program that rewrites HTML.",
    remedy: "Copy the file again, or write it anew from the trace.",
  },
  newer: {
    title: "This report holds newer data",
    text: "The page is older than the data inside it, and would show wrong numbers.",
    remedy: "Write the report again with one version of gradtrace.",
  },
  browser: {
    title: "This browser is too old",
    text: "The report is compressed, and this browser cannot decompress it.",
    remedy: "Open the file in Chrome 80, Edge 80, Firefox 113, Safari 16.4, or later.",
  },
};

export function Failure({ reason, detail }: { reason: Reason; detail: string }) {
  const { title, text, remedy } = texts[reason];
  return (
    <main class="failure">
      <p class="failure-mark" aria-hidden="true">
        ∂
      </p>
      <h1>{title}</h1>
      <p>{text}</p>
      <p>{remedy}</p>
      <p class="failure-detail">Reason: {detail}.</p>
    </main>
  );
}
