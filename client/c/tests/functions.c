/* Calls every function, and compares its results. Usage: functions SERVER */
#include <farside.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* Ends the program unless the result is the expected one. */
#define EXPECT(expected, result) expect(__LINE__, (long long)(expected), (long long)(result))

static void expect(int line, long long expected, long long result) {
    if (expected != result) {
        fprintf(stderr, "line %d: %lld instead of %lld\n", line, result, expected);
        exit(1);
    }
}

static void expect_text(int line, const char *part, const char *text) {
    if (strstr(text, part) == NULL) {
        fprintf(stderr, "line %d: no \"%s\" in \"%s\"\n", line, part, text);
        exit(1);
    }
}
#define EXPECT_TEXT(part, text) expect_text(__LINE__, part, text)

static farside_client *connected(const char *server) {
    farside_options *options = farside_options_new();
    farside_client *client = NULL;
    EXPECT(FARSIDE_OK, farside_options_server(options, server));
    EXPECT(FARSIDE_OK, farside_options_cache_bytes(options, 1 << 20));
    EXPECT(FARSIDE_OK, farside_options_pipeline_depth(options, 4));
    EXPECT(FARSIDE_OK, farside_options_connect_timeout_ms(options, 60000));
    EXPECT(FARSIDE_OK, farside_options_tls(options, NULL, NULL, NULL));
    EXPECT(FARSIDE_OK, farside_connect(options, &client));
    farside_options_free(options);
    return client;
}

static void connecting_fails(const char *server) {
    char path[] = "/tmp/farside-XXXXXX";
    FILE *file;
    farside_options *options = farside_options_new();
    farside_client *client = NULL;
    EXPECT(FARSIDE_ERROR_ARGUMENT, farside_options_server(options, NULL));
    EXPECT_TEXT("server is NULL", farside_error());
    EXPECT(FARSIDE_ERROR_ARGUMENT, farside_connect(options, &client));
    EXPECT(FARSIDE_ERROR_ARGUMENT, farside_connect(NULL, &client));
    EXPECT(FARSIDE_OK, farside_options_server(options, "shm:///nowhere/kv.sock"));
    EXPECT(FARSIDE_OK, farside_options_connect_timeout_ms(options, 1));
    EXPECT(FARSIDE_ERROR_UNAVAILABLE, farside_connect(options, &client));
    EXPECT_TEXT("/nowhere/kv.sock", farside_error());
    EXPECT(1, client == NULL);
    EXPECT(FARSIDE_OK, farside_options_server(options, "nonsense"));
    EXPECT(FARSIDE_ERROR_ARGUMENT, farside_connect(options, &client));
    EXPECT(FARSIDE_ERROR_ARGUMENT, farside_options_file(options, "/nowhere/client.toml"));
    EXPECT_TEXT("/nowhere/client.toml", farside_error());
    EXPECT(FARSIDE_OK, farside_options_secret(options, "secret"));
    file = fdopen(mkstemp(path), "w");
    EXPECT(1, file != NULL);
    fputs("server = \"shm:///elsewhere/kv.sock\"\n", file);
    fclose(file);
    EXPECT(FARSIDE_OK, farside_options_file(options, path));
    remove(path);
    EXPECT(FARSIDE_ERROR_UNAVAILABLE, farside_connect(options, &client));
    EXPECT_TEXT("/elsewhere/kv.sock", farside_error());
    farside_options_free(options);

    options = farside_options_new();
    EXPECT(FARSIDE_OK, farside_options_server(options, server));
    EXPECT(FARSIDE_OK, farside_options_read_only(options));
    EXPECT(FARSIDE_OK, farside_connect(options, &client));
    farside_options_free(options);
    {
        farside_session *reader = NULL;
        EXPECT(FARSIDE_OK, farside_session_open(client, &reader));
        EXPECT(FARSIDE_ERROR_DENIED, farside_put(reader, "key", 3, "value", 5));
        farside_session_close(reader);
    }
    farside_client_free(client);
    EXPECT(FARSIDE_ERROR_ARGUMENT, farside_session_open(NULL, NULL));
    farside_options_free(NULL);
    farside_client_free(NULL);
    farside_session_close(NULL);
    farside_pipeline_close(NULL);
    farside_buffer_free(NULL);
    EXPECT_TEXT("NULL", farside_session_error(NULL));
    EXPECT_TEXT("NULL", farside_pipeline_error(NULL));
    EXPECT(-1, farside_pipeline_event_fd(NULL));
    EXPECT(1, farside_version()[0] != 0);
}

static void one_key(farside_session *session) {
    char value[64];
    size_t value_bytes = 0;
    uint64_t version = 0, present = 0, ttl_ms = 0;
    int64_t sum = 0;
    farside_store_options how;

    memset(&how, 0, sizeof how);
    EXPECT(FARSIDE_ABSENT, farside_get(session, "key", 3, value, 64, &value_bytes, &version));
    EXPECT(FARSIDE_ABSENT, farside_exists(session, "key", 3));
    EXPECT(FARSIDE_ABSENT, farside_delete(session, "key", 3));
    EXPECT(FARSIDE_ABSENT, farside_touch(session, "key", 3, 1000));
    EXPECT(FARSIDE_ABSENT, farside_persist(session, "key", 3));
    EXPECT(FARSIDE_ABSENT, farside_ttl_ms(session, "key", 3, &ttl_ms));
    EXPECT(FARSIDE_ABSENT, farside_key_version(session, "key", 3, &version));

    EXPECT(FARSIDE_OK, farside_put(session, "key", 3, "value", 5));
    EXPECT(FARSIDE_OK, farside_exists(session, "key", 3));
    EXPECT(FARSIDE_OK, farside_get(session, "key", 3, value, 64, &value_bytes, &version));
    EXPECT(5, value_bytes);
    EXPECT(0, memcmp(value, "value", 5));
    EXPECT(FARSIDE_OK, farside_get(session, "key", 3, value, 5, NULL, NULL));
    value_bytes = 0;
    EXPECT(FARSIDE_TOO_SHORT, farside_get(session, "key", 3, value, 4, &value_bytes, NULL));
    EXPECT(5, value_bytes);
    EXPECT(FARSIDE_OK, farside_put(session, "none", 4, NULL, 0));
    EXPECT(FARSIDE_OK, farside_get(session, "none", 4, NULL, 0, &value_bytes, NULL));
    EXPECT(0, value_bytes);

    EXPECT(FARSIDE_ERROR_LENGTH, farside_put(session, "", 0, "value", 5));
    EXPECT_TEXT("key", farside_session_error(session));
    EXPECT(FARSIDE_ERROR_ARGUMENT, farside_put(session, NULL, 3, "value", 5));
    EXPECT(FARSIDE_ERROR_ARGUMENT, farside_put(NULL, "key", 3, "value", 5));

    how.condition = FARSIDE_IF_ABSENT;
    EXPECT(FARSIDE_NOT_APPLIED, farside_store(session, "key", 3, "x", 1, &how, NULL));
    how.condition = FARSIDE_IF_PRESENT;
    EXPECT(FARSIDE_NOT_APPLIED, farside_store(session, "other", 5, "x", 1, &how, NULL));
    how.condition = FARSIDE_IF_VERSION;
    how.version = version;
    EXPECT(FARSIDE_OK, farside_store(session, "key", 3, "second", 6, &how, &present));
    EXPECT(1, present != version);
    EXPECT(FARSIDE_NOT_APPLIED, farside_store(session, "key", 3, "third", 5, &how, NULL));
    EXPECT(FARSIDE_OK, farside_key_version(session, "key", 3, &version));
    EXPECT(present, version);
    how.condition = FARSIDE_IF_VALUE;
    how.expected = "second";
    how.expected_bytes = 6;
    how.ttl_ms = 100000;
    EXPECT(FARSIDE_OK, farside_store(session, "key", 3, "third", 5, &how, NULL));
    EXPECT(FARSIDE_OK, farside_ttl_ms(session, "key", 3, &ttl_ms));
    EXPECT(1, ttl_ms > 10000 && ttl_ms <= 100000);
    how.condition = FARSIDE_ALWAYS;
    how.ttl_ms = FARSIDE_KEEP_TTL;
    how.pinned = 1;
    EXPECT(FARSIDE_OK, farside_store(session, "key", 3, "fourth", 6, &how, NULL));
    EXPECT(FARSIDE_OK, farside_ttl_ms(session, "key", 3, &ttl_ms));
    EXPECT(1, ttl_ms > 10000 && ttl_ms <= 100000);
    EXPECT(FARSIDE_ERROR_ARGUMENT, farside_touch(session, "key", 3, 0));
    EXPECT(FARSIDE_ERROR_ARGUMENT, farside_touch(session, "key", 3, FARSIDE_KEEP_TTL));
    EXPECT(FARSIDE_OK, farside_persist(session, "key", 3));
    EXPECT(FARSIDE_OK, farside_ttl_ms(session, "key", 3, &ttl_ms));
    EXPECT(1, ttl_ms == FARSIDE_FOREVER);
    EXPECT(FARSIDE_OK, farside_touch(session, "key", 3, 50000));
    how.reserved[1] = 1;
    EXPECT(FARSIDE_ERROR_ARGUMENT, farside_store(session, "key", 3, "x", 1, &how, NULL));
    how.reserved[1] = 0;
    how.condition = 9;
    EXPECT(FARSIDE_ERROR_ARGUMENT, farside_store(session, "key", 3, "x", 1, &how, NULL));

    EXPECT(FARSIDE_OK, farside_append(session, "key", 3, " part", 5, &value_bytes));
    EXPECT(11, value_bytes);
    EXPECT(FARSIDE_ERROR_NUMBER, farside_increment(session, "key", 3, 1, &sum));
    EXPECT(FARSIDE_OK, farside_increment(session, "count", 5, 40, &sum));
    EXPECT(FARSIDE_OK, farside_increment(session, "count", 5, 2, &sum));
    EXPECT(42, sum);
    EXPECT(FARSIDE_ABSENT, farside_delete_if_version(session, "key", 3, present));
    EXPECT(FARSIDE_OK, farside_key_version(session, "key", 3, &version));
    EXPECT(FARSIDE_OK, farside_delete_if_version(session, "key", 3, version));
    EXPECT(FARSIDE_OK, farside_delete(session, "count", 5));
}

static void many_keys(farside_session *session) {
    enum { COUNT = 50 };
    static char keys[COUNT + 1][8], values[COUNT + 1][16];
    static farside_put_entry puts[COUNT];
    static farside_key names[COUNT];
    static farside_get_entry gets[COUNT + 1];
    uint64_t deleted = 0;
    int n;

    for (n = 0; n <= COUNT; n++) {
        gets[n].key = keys[n];
        gets[n].key_bytes = (size_t)snprintf(keys[n], sizeof keys[n], "many%d", n);
        gets[n].buffer = values[n];
        gets[n].buffer_bytes = sizeof values[n];
        if (n < COUNT) {
            puts[n].key = puts[n].value = keys[n];
            puts[n].key_bytes = puts[n].value_bytes = gets[n].key_bytes;
            names[n].key = keys[n];
            names[n].key_bytes = gets[n].key_bytes;
        }
    }
    EXPECT(FARSIDE_OK, farside_put_many(session, puts, COUNT));
    EXPECT(FARSIDE_OK, farside_get_many(session, gets, COUNT + 1));
    for (n = 0; n < COUNT; n++) {
        EXPECT(FARSIDE_OK, gets[n].status);
        EXPECT(gets[n].key_bytes, gets[n].value_bytes);
        EXPECT(0, memcmp(keys[n], values[n], gets[n].value_bytes));
        EXPECT(1, gets[n].version != 0);
    }
    EXPECT(FARSIDE_ABSENT, gets[COUNT].status);
    gets[7].buffer_bytes = 2;
    EXPECT(FARSIDE_OK, farside_get_many(session, gets, COUNT + 1));
    for (n = 0; n <= COUNT; n++) {
        EXPECT(n == 7 ? FARSIDE_TOO_SHORT : n < COUNT ? FARSIDE_OK : FARSIDE_ABSENT, gets[n].status);
        EXPECT(n < COUNT ? gets[n].key_bytes : 0, gets[n].value_bytes);
    }
    EXPECT(FARSIDE_OK, farside_delete_many(session, names, COUNT, &deleted));
    EXPECT(COUNT, deleted);
    EXPECT(FARSIDE_OK, farside_put_many(session, NULL, 0));
    EXPECT(FARSIDE_ERROR_ARGUMENT, farside_get_many(session, NULL, 1));
}

/* Waits for a result with this ticket. */
static farside_completed take(farside_pipeline *pipeline, uint64_t ticket) {
    farside_completed completed;
    EXPECT(FARSIDE_OK, farside_pipeline_wait(pipeline, &completed));
    EXPECT(ticket, completed.ticket);
    return completed;
}

static void any_pipeline(farside_pipeline *pipeline) {
    farside_completed done;
    farside_store_options how;
    uint64_t ticket = 0;
    char expected[5];

    memset(&how, 0, sizeof how);
    EXPECT(FARSIDE_NONE, farside_pipeline_wait(pipeline, &done));
    EXPECT(FARSIDE_NONE, farside_pipeline_poll(pipeline, &done));
    EXPECT(FARSIDE_OK, farside_pipeline_get(pipeline, "key", 3, &ticket));
    done = take(pipeline, ticket);
    EXPECT(FARSIDE_ABSENT, done.status);
    EXPECT(1, done.value == NULL);
    EXPECT(FARSIDE_OK, farside_pipeline_store(pipeline, "key", 3, "value", 5, NULL, &ticket));
    done = take(pipeline, ticket);
    EXPECT(FARSIDE_OK, done.status);
    EXPECT(1, done.version != 0);
    EXPECT(FARSIDE_OK, farside_pipeline_get(pipeline, "key", 3, &ticket));
    done = take(pipeline, ticket);
    EXPECT(5, done.value_bytes);
    EXPECT(0, memcmp(done.value, "value", 5));
    how.condition = FARSIDE_IF_VALUE;
    how.expected = "other";
    how.expected_bytes = 5;
    EXPECT(FARSIDE_OK, farside_pipeline_store(pipeline, "key", 3, "x", 1, &how, &ticket));
    EXPECT(FARSIDE_NOT_APPLIED, take(pipeline, ticket).status);
    memcpy(expected, "value", 5);
    how.expected = expected;
    EXPECT(FARSIDE_OK, farside_pipeline_store(pipeline, "key", 3, "x", 1, &how, &ticket));
    memset(expected, 0, sizeof expected); /* it was copied */
    EXPECT(FARSIDE_OK, take(pipeline, ticket).status);
    EXPECT(FARSIDE_OK, farside_pipeline_touch(pipeline, "key", 3, 100000, &ticket));
    EXPECT(FARSIDE_OK, take(pipeline, ticket).status);
    EXPECT(FARSIDE_OK, farside_pipeline_increment(pipeline, "key", 3, 1, &ticket));
    EXPECT(FARSIDE_ERROR_NUMBER, take(pipeline, ticket).status);
    EXPECT_TEXT("number", farside_pipeline_error(pipeline));
    EXPECT(FARSIDE_OK, farside_pipeline_increment(pipeline, "sum", 3, 7, &ticket));
    EXPECT(7, take(pipeline, ticket).number);
    EXPECT(FARSIDE_OK, farside_pipeline_delete_if_version(pipeline, "key", 3, 1, &ticket));
    EXPECT(FARSIDE_ABSENT, take(pipeline, ticket).status);
    EXPECT(FARSIDE_OK, farside_pipeline_delete(pipeline, "key", 3, &ticket));
    EXPECT(FARSIDE_OK, take(pipeline, ticket).status);
    EXPECT(FARSIDE_OK, farside_pipeline_delete(pipeline, "sum", 3, NULL));
    EXPECT(FARSIDE_OK, farside_pipeline_wait(pipeline, &done));
    EXPECT(FARSIDE_ERROR_ARGUMENT, farside_pipeline_get(pipeline, NULL, 3, NULL));
    EXPECT(FARSIDE_ERROR_ARGUMENT, farside_pipeline_wait(pipeline, NULL));
    EXPECT(FARSIDE_OK, farside_pipeline_get(pipeline, "", 0, &ticket));
    EXPECT(FARSIDE_ERROR_LENGTH, take(pipeline, ticket).status);
}

static void pipelines(farside_client *client, farside_session *session) {
    farside_pipeline *pipeline = NULL;
    farside_session *other = NULL;
    farside_completed done;
    struct pollfd event;
    int n;

    EXPECT(FARSIDE_OK, farside_pipeline_open(session, &pipeline));
    EXPECT(FARSIDE_ERROR_ARGUMENT, farside_exists(session, "key", 3));
    EXPECT_TEXT("pipeline", farside_session_error(session));
    EXPECT(-1, farside_pipeline_event_fd(pipeline));
    any_pipeline(pipeline);
    for (n = 0; n < 4; n++) {
        EXPECT(FARSIDE_OK, farside_pipeline_get(pipeline, "key", 3, NULL));
    }
    EXPECT(FARSIDE_BUSY, farside_pipeline_get(pipeline, "key", 3, NULL));
    farside_pipeline_close(pipeline);
    EXPECT(FARSIDE_ABSENT, farside_exists(session, "key", 3));

    /* A session may be closed before its pipeline. */
    EXPECT(FARSIDE_OK, farside_session_open(client, &other));
    EXPECT(FARSIDE_OK, farside_pipeline_open(other, &pipeline));
    farside_session_close(other);
    EXPECT(FARSIDE_OK, farside_pipeline_store(pipeline, "key", 3, "value", 5, NULL, NULL));
    farside_pipeline_close(pipeline);
    EXPECT(FARSIDE_OK, farside_delete(session, "key", 3));

    EXPECT(FARSIDE_OK, farside_pipeline_open_threaded(client, &pipeline));
    any_pipeline(pipeline);
    event.fd = farside_pipeline_event_fd(pipeline);
    event.events = POLLIN;
    /* With nothing in flight the descriptor becomes unreadable, a late wakeup apart. */
    for (n = 0; n < 100 && poll(&event, 1, 0) != 0; n++) {
        EXPECT(FARSIDE_NONE, farside_pipeline_poll(pipeline, &done));
        poll(NULL, 0, 1);
    }
    EXPECT(1, n < 100);
    /* Operations go on although nobody takes the results. */
    for (n = 0; n < 50; n++) {
        EXPECT(FARSIDE_OK, farside_pipeline_store(pipeline, &n, sizeof n, "first", 5, NULL, NULL));
    }
    for (n = 0; n < 50; n++) {
        while (farside_exists(session, &n, sizeof n) != FARSIDE_OK) poll(NULL, 0, 1);
    }
    for (n = 0; n < 50; n++) {
        EXPECT(FARSIDE_OK, farside_pipeline_wait(pipeline, &done));
    }
    for (n = 0; n < 100; n++) {
        EXPECT(FARSIDE_OK, farside_pipeline_store(pipeline, &n, sizeof n, "value", 5, NULL, NULL));
    }
    for (n = 0; n < 100; n++) {
        /* The descriptor stays readable until there is nothing more to take. */
        EXPECT(1, poll(&event, 1, 60000));
        while (farside_pipeline_poll(pipeline, &done) == FARSIDE_NONE) {
            EXPECT(1, poll(&event, 1, 60000));
        }
        EXPECT(FARSIDE_OK, done.status);
    }
    EXPECT(FARSIDE_NONE, farside_pipeline_poll(pipeline, &done));
    EXPECT(FARSIDE_OK, farside_pipeline_store(pipeline, "key", 3, "value", 5, NULL, NULL));
    farside_pipeline_close(pipeline);
    EXPECT(FARSIDE_OK, farside_delete(session, "key", 3));
}

static void buffers(const farside_client *client, farside_session *session) {
    enum { BYTES = 100000 };
    farside_buffer *buffer = NULL;
    char *data;
    size_t value_bytes = 0;

    EXPECT(FARSIDE_OK, farside_buffer_new(client, 2 * BYTES, &buffer));
    EXPECT(2 * BYTES, farside_buffer_bytes(buffer));
    data = (char *)farside_buffer_data(buffer);
    memset(data, 'x', BYTES);
    EXPECT(FARSIDE_OK, farside_put(session, "long", 4, data, BYTES));
    EXPECT(FARSIDE_OK,
           farside_get(session, "long", 4, data + BYTES, BYTES, &value_bytes, NULL));
    EXPECT(BYTES, value_bytes);
    EXPECT(0, memcmp(data, data + BYTES, BYTES));
    farside_buffer_free(buffer);
    EXPECT(1, farside_buffer_data(NULL) == NULL);
    EXPECT(0, farside_buffer_bytes(NULL));
}

/* In a child everything of the parent is refused, and can be freed. */
static void in_a_child(farside_client *client, farside_session *session,
                       farside_pipeline *pipeline) {
    farside_buffer *buffer = NULL;
    farside_session *other = NULL;
    pid_t child;
    int status = 1;

    EXPECT(FARSIDE_OK, farside_buffer_new(client, 1 << 20, &buffer));
    fflush(NULL);
    child = fork();
    if (child == 0) {
        EXPECT(FARSIDE_ERROR_ARGUMENT, farside_exists(session, "key", 3));
        EXPECT_TEXT("after fork(), connect", farside_session_error(session));
        EXPECT(FARSIDE_ERROR_ARGUMENT, farside_session_open(client, &other));
        EXPECT(FARSIDE_ERROR_ARGUMENT, farside_pipeline_get(pipeline, "key", 3, NULL));
        EXPECT(1, farside_buffer_data(buffer) == NULL);
        EXPECT(0, farside_buffer_bytes(buffer));
        farside_buffer_free(buffer);
        farside_pipeline_close(pipeline);
        farside_session_close(session);
        farside_client_free(client);
        /* It forgets the memory of what it closed, which valgrind must not take for a leak. */
        kill(getpid(), SIGKILL);
    }
    EXPECT(child, waitpid(child, &status, 0));
    EXPECT(SIGKILL, WIFSIGNALED(status) ? WTERMSIG(status) : 0);
    EXPECT(FARSIDE_ABSENT, farside_exists(session, "key", 3));
    farside_buffer_free(buffer);
}

int main(int argc, char **argv) {
    farside_client *client;
    farside_session *session = NULL;
    farside_pipeline *pipeline = NULL;

    EXPECT(2, argc);
    connecting_fails(argv[1]);
    client = connected(argv[1]);
    EXPECT(FARSIDE_OK, farside_session_open(client, &session));
    one_key(session);
    many_keys(session);
    pipelines(client, session);
    buffers(client, session);
    EXPECT(FARSIDE_OK, farside_pipeline_open_threaded(client, &pipeline));
    in_a_child(client, session, pipeline);
    farside_pipeline_close(pipeline);
    farside_client_free(client); /* before its session */
    EXPECT(FARSIDE_ABSENT, farside_exists(session, "key", 3));
    farside_session_close(session);
    puts("all functions");
    return 0;
}
