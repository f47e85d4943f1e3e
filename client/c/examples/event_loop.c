/* Keeps 1000 operations in flight, and sleeps in poll() until some have completed, as an event loop
 * does. Usage: event_loop SERVER */
#include <farside.h>
#include <poll.h>
#include <stdio.h>

#define KEYS 1000

static int fail(const char *text) {
    fprintf(stderr, "event_loop: %s\n", text);
    return 1;
}

/* Takes results until so many operations have completed. */
static int take(farside_pipeline *pipeline, unsigned count) {
    struct pollfd event;
    farside_completed completed;

    event.fd = farside_pipeline_event_fd(pipeline);
    event.events = POLLIN;
    while (count > 0) {
        poll(&event, 1, -1); /* together with the sockets of the program */
        while (farside_pipeline_poll(pipeline, &completed) == FARSIDE_OK) {
            if (completed.status != FARSIDE_OK) return fail(farside_pipeline_error(pipeline));
            count--;
        }
    }
    return 0;
}

int main(int argc, char **argv) {
    farside_options *options = farside_options_new();
    farside_client *client = NULL;
    farside_pipeline *pipeline = NULL;
    unsigned key;

    if (argc != 2) return fail("usage: event_loop shm:///run/farside/kv.sock");
    if (farside_options_server(options, argv[1]) != FARSIDE_OK ||
        farside_connect(options, &client) != FARSIDE_OK ||
        farside_pipeline_open_threaded(client, &pipeline) != FARSIDE_OK) {
        return fail(farside_error());
    }
    farside_options_free(options);
    for (key = 0; key < KEYS; key++) {
        farside_pipeline_store(pipeline, &key, sizeof key, "value", 5, NULL, NULL);
    }
    if (take(pipeline, KEYS) != 0) return 1;
    for (key = 0; key < KEYS; key++) farside_pipeline_get(pipeline, &key, sizeof key, NULL);
    if (take(pipeline, KEYS) != 0) return 1;
    printf("%d values stored and read\n", KEYS);
    farside_pipeline_close(pipeline);
    farside_client_free(client);
    return 0;
}
