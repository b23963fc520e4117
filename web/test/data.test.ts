import { expect, test } from "vitest";
import { decode } from "../src/data";

test("an unfilled template says so", async () => {
  await expect(decode("<!--gradtrace-data-->")).rejects.toMatchObject({ reason: "empty" });
});
