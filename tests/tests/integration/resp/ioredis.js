// What programs do with ioredis, at a port of this host.
const assert = require("node:assert");
const Redis = require("ioredis");

async function main(port) {
  const redis = new Redis({ port });
  await redis.flushdb();
  assert.equal(await redis.set("greeting", "hello", "EX", 100), "OK");
  assert.equal(await redis.get("greeting"), "hello");
  const ttl = await redis.ttl("greeting");
  assert.ok(ttl > 0 && ttl <= 100);
  assert.equal(await redis.set("greeting", "again", "NX"), null);
  assert.equal(await redis.incrby("count", 5), 5);
  await redis.mset({ a: "1", b: "2" });
  assert.deepEqual(await redis.mget("a", "none", "b"), ["1", null, "2"]);
  const bytes = Buffer.from(Array.from({ length: 256 }, (_, byte) => byte));
  await redis.set(bytes, bytes);
  assert.deepEqual(await redis.getBuffer(bytes), bytes);
  assert.equal(await redis.del("a", "b", bytes), 3);
  const pipeline = redis.pipeline();
  for (let number = 0; number < 100; number++) {
    pipeline.set(`key-${number}`, number).get(`key-${number}`);
  }
  const replies = await pipeline.exec();
  assert.ok(replies.every(([error]) => error === null));
  assert.equal(replies[199][1], "99");
  const numbers = Array.from({ length: 200 }, (_, number) => number);
  await Promise.all(numbers.map((number) => redis.set(`task-${number}`, number)));
  const values = await Promise.all(numbers.map((number) => redis.get(`task-${number}`)));
  assert.deepEqual(values, numbers.map(String));
  const found = new Set();
  for await (const keys of redis.scanStream({ match: "task-*" })) {
    keys.forEach((key) => found.add(key));
  }
  assert.equal(found.size, 200);
  await assert.rejects(redis.incr("greeting"), /not an integer/);
  await assert.rejects(redis.multi().set("in-transaction", 1).exec(), /no transactions/);
  assert.equal(await redis.get("in-transaction"), null);
  await redis.quit();
}

// With `node -e` the arguments come right behind the program.
main(Number(process.argv[1])).then(
  () => console.log("ioredis", require("ioredis/package.json").version),
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
