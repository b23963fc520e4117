/** Light and dark: as the system says, until the reader says otherwise. */
import { useEffect, useState } from "preact/hooks";

type Choice = "light" | "dark";

const KEY = "gradtrace-theme";

/** Storage is refused in sandboxed frames; the choice then lasts as long as the page. */
function stored(): Choice | null {
  try {
    const value = localStorage.getItem(KEY);
    return value === "light" || value === "dark" ? value : null;
  } catch {
    return null;
  }
}

export function Theme() {
  const [choice, set] = useState(stored);
  const dark = choice ? choice === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  useEffect(() => {
    if (choice) document.documentElement.dataset.theme = choice;
  }, [choice]);
  const turn = () => {
    const next = dark ? "light" : "dark";
    set(next);
    try {
      localStorage.setItem(KEY, next);
    } catch {
      // see above
    }
  };
  const name = dark ? "Light colours" : "Dark colours";
  return (
    <button class="icon" aria-label={name} title={name} onClick={turn}>
      <svg width="18" height="18" viewBox="0 0 18 18" aria-hidden="true">
        {dark ? (
          <>
            <circle cx="9" cy="9" r="3.5" />
            <path d="M9 1.5v2M9 14.5v2M1.5 9h2M14.5 9h2M3.7 3.7l1.4 1.4M12.9 12.9l1.4 1.4M3.7 14.3l1.4-1.4M12.9 5.1l1.4-1.4" />
          </>
        ) : (
          <path d="M15 10.6A6.5 6.5 0 0 1 7.4 3a6.5 6.5 0 1 0 7.6 7.6z" />
        )}
      </svg>
    </button>
  );
}
