/* Stores a row of numbers for each user, and reads a hundred rows with one doorbell into an array.
 * Usage: feature_store SERVER */
#include <farside.h>
#include <stdio.h>

#define USERS 100
#define FEATURES 32

static int fail(const char *text) {
    fprintf(stderr, "feature_store: %s\n", text);
    return 1;
}

int main(int argc, char **argv) {
    farside_options *options = farside_options_new();
    farside_client *client = NULL;
    farside_session *session = NULL;
    static char keys[USERS][16];
    static float rows[USERS][FEATURES], found[USERS][FEATURES];
    static farside_put_entry puts[USERS];
    static farside_get_entry gets[USERS];
    int user, feature;
    double sum = 0;

    if (argc != 2) return fail("usage: feature_store shm:///run/farside/kv.sock");
    if (farside_options_server(options, argv[1]) != FARSIDE_OK ||
        farside_connect(options, &client) != FARSIDE_OK ||
        farside_session_open(client, &session) != FARSIDE_OK) {
        return fail(farside_error());
    }
    farside_options_free(options);

    for (user = 0; user < USERS; user++) {
        size_t key_bytes = (size_t)snprintf(keys[user], sizeof keys[user], "user:%d", user);
        for (feature = 0; feature < FEATURES; feature++) rows[user][feature] = (float)user;
        puts[user].key = gets[user].key = keys[user];
        puts[user].key_bytes = gets[user].key_bytes = key_bytes;
        puts[user].value = rows[user];
        puts[user].value_bytes = sizeof rows[user];
        gets[user].buffer = found[user];
        gets[user].buffer_bytes = sizeof found[user];
    }
    if (farside_put_many(session, puts, USERS) != FARSIDE_OK ||
        farside_get_many(session, gets, USERS) != FARSIDE_OK) {
        return fail(farside_session_error(session));
    }
    for (user = 0; user < USERS; user++) {
        if (gets[user].status == FARSIDE_OK) sum += found[user][0];
    }
    printf("sum of the first features: %.0f\n", sum);
    farside_session_close(session);
    farside_client_free(client);
    return 0;
}
