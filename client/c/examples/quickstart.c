/* Stores a value, reads it, and replaces it only if nobody else did. Usage: quickstart SERVER */
#include <farside.h>
#include <stdio.h>
#include <string.h>

static int fail(const char *text) {
    fprintf(stderr, "quickstart: %s\n", text);
    return 1;
}

int main(int argc, char **argv) {
    farside_options *options = farside_options_new();
    farside_client *client = NULL;   /* for all threads */
    farside_session *session = NULL; /* for one thread at a time */
    char value[16];
    size_t value_bytes = 0;
    uint64_t version = 0;
    farside_store_options replace;

    if (argc != 2) return fail("usage: quickstart shm:///run/farside/kv.sock");
    if (farside_options_server(options, argv[1]) != FARSIDE_OK ||
        farside_connect(options, &client) != FARSIDE_OK ||
        farside_session_open(client, &session) != FARSIDE_OK) {
        return fail(farside_error());
    }
    farside_options_free(options);

    if (farside_put(session, "greeting", 8, "hello", 5) != FARSIDE_OK ||
        farside_get(session, "greeting", 8, value, sizeof value, &value_bytes, &version) !=
            FARSIDE_OK) {
        return fail(farside_session_error(session));
    }
    printf("%.*s\n", (int)value_bytes, value);

    memset(&replace, 0, sizeof replace);
    replace.condition = FARSIDE_IF_VERSION;
    replace.version = version;
    switch (farside_store(session, "greeting", 8, "hi", 2, &replace, NULL)) {
    case FARSIDE_OK: puts("replaced"); break;
    case FARSIDE_NOT_APPLIED: puts("another client was faster"); break;
    default: return fail(farside_session_error(session));
    }
    farside_session_close(session);
    farside_client_free(client);
    return 0;
}
