/** What a diagnosis found, worst first: what was seen, where, and what to do. */
import { counted, moduleName, short } from "./format";
import { inGraph } from "./graph/boxes";
import type { Diagnosis, Finding, Trace } from "./types";

const WORDS = { error: "Error", warning: "Warning", note: "Note" } as const;
const LONG = 1000;

/** One sentence on the whole: how much is wrong. */
export function verdict(found: Diagnosis): string {
  const errors = found.findings.filter((each) => each.severity === "error").length;
  const warnings = found.findings.filter((each) => each.severity === "warning").length;
  const parts = [errors && counted(errors, "error"), warnings && counted(warnings, "warning")].filter(Boolean);
  if (parts.length) return `Something is wrong: ${parts.join(" and ")}.`;
  return "The diagnosis found nothing wrong.";
}

/** What was found of a module, or of one inside it. */
export function findingsOf(trace: Trace, module: number): Finding[] {
  const inside = (at: number): boolean => {
    for (let up = at; up > 0; up = trace.modules[up]!.parent) if (up === module) return true;
    return false;
  };
  return (trace.diagnosis?.findings ?? []).filter((each) => inside(each.module));
}

/** The worst severity of each module that something was found of. */
export function marks(trace: Trace): Map<number, Finding["severity"]> {
  const found = new Map<number, Finding["severity"]>();
  for (const { module, severity } of trace.diagnosis?.findings ?? [])
    if (module > 0 && severity !== "note" && !found.has(module)) found.set(module, severity);
  return found;
}

const capital = (text: string): string => text.slice(0, 1).toUpperCase() + text.slice(1);

interface Places {
  trace: Trace;
  show: (module: number) => void; // leads to a module
}

/** The findings as a list, with links to the modules of a trace, if there is one. */
export function Findings({ found, at }: { found: Diagnosis; at?: Places }) {
  return (
    <>
      {found.findings.length > 0 && (
        <ul class="diagnosis" data-testid="diagnosis">
          {found.findings.map((each) => (
            <One found={each} {...(at && { at })} />
          ))}
        </ul>
      )}
      {found.remarks.map((remark) => (
        <p class="fine">
          <bdi>{short(remark, LONG)}</bdi>
        </p>
      ))}
    </>
  );
}

/** What was found, in a line each. */
export function Brief({ findings }: { findings: readonly Finding[] }) {
  return (
    <ul class="diagnosis brief">
      {findings.map((each) => (
        <li>
          <span class={`severity is-${each.severity}`}>{WORDS[each.severity]}</span> <bdi>{capital(short(each.title, 300))}</bdi>
          {each.line && (
            <code class="line">
              <bdi>{short(each.line, 300)}</bdi>
            </code>
          )}
        </li>
      ))}
    </ul>
  );
}

function One({ found, at }: { found: Finding; at?: Places }) {
  const name = short(moduleName(found.place), 60);
  return (
    <li class={`is-${found.severity}`} data-testid="finding" data-kind={found.kind} data-module={found.place}>
      <h3>
        <span class={`severity is-${found.severity}`}>{WORDS[found.severity]}</span>
        <bdi>{capital(short(found.title, LONG))}</bdi>
      </h3>
      {found.line && (
        <code class="line" data-testid="line">
          <bdi>{short(found.line, LONG)}</bdi>
        </code>
      )}
      {found.evidence && (
        <p>
          <bdi>{short(found.evidence, LONG)}</bdi>
        </p>
      )}
      {found.advice && (
        <p>
          <strong>What to do:</strong> <bdi>{short(found.advice, LONG)}</bdi>
        </p>
      )}
      {found.module > 0 && at ? (
        <button type="button" class="plain-link" onClick={() => at.show(found.module)}>
          {inGraph(at.trace, found.module) ? "Show in the graph: " : "What is known of "}
          <bdi>{name}</bdi>
        </button>
      ) : (
        found.place && (
          <p class="fine">
            In <bdi>{name}</bdi>
          </p>
        )
      )}
    </li>
  );
}
