/** The name of a module or parameter, which breaks at its dots where it needs several lines. */
import { short } from "./format";

export function Dotted({ name, most }: { name: string; most: number }) {
  const parts = short(name, most).split(".");
  return (
    <bdi title={short(name, 400)}>
      {parts.map((part, n) => (
        <>
          {n > 0 && (
            <>
              .<wbr />
            </>
          )}
          {part}
        </>
      ))}
    </bdi>
  );
}
