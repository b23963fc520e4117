/** Lays boxes out away from the page, so that it stays at the reader's service. */
import { arranged } from "./layered";
import { layout, type Arranged, type Job, type Plan } from "./layout";

export interface Question {
  id: number;
  jobs: Job[];
}

export interface Answer {
  id: number;
  plans: Plan[];
}

self.onmessage = ({ data }: MessageEvent<Question>) => {
  const answer: Answer = { id: data.id, plans: layout(data.jobs, remembered) };
  self.postMessage(answer);
};

/** A box that is as it was keeps its layout: opening one box lays out only those around it. */
const memory = new Map<string, Arranged>();

function remembered(job: Job): Arranged {
  const key = [job.nodes, job.width, job.height, job.from, job.to].map(String).join("|");
  let found = memory.get(key);
  if (!found) {
    if (memory.size > 500) memory.clear();
    memory.set(key, (found = arranged(job)));
  }
  return { ...found, bends: found.bends.map((each) => each.slice()) };
}
