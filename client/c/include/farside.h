/*
 * farside.h: the client library of Farside, a one-sided RDMA key-value store on far memory.
 *
 * Generated from client/c/src: do not edit it.
 *
 * Functions that can fail return a farside_status: 0 for success, a positive number for another
 * answer, such as FARSIDE_ABSENT, a negative one for an error. farside_session_error() and
 * farside_pipeline_error() return the text of the last error. For functions without a session or
 * pipeline it is farside_error(). No function lets an exception through, or ends the process, except
 * when memory runs out. After an error nothing has changed, unless the text says otherwise.
 *
 * Threads: all threads may use one client at once. One thread at a time may use a session; which
 * one does not matter. The same holds for a pipeline and for options. The library starts threads,
 * which inherit the signal mask of the thread that connects.
 *
 * Pointers: they must be valid, unless the text allows NULL. A NULL that it does not allow is
 * FARSIDE_ERROR_ARGUMENT. Bytes whose number is 0 may be NULL, as may a pointer for a result that
 * is not needed. Memory for a result must not overlap a key, a value, or the memory for another
 * result. During a call, no other thread may write its arguments or use its results. Keys and
 * values are any bytes, and need no terminating zero.
 *
 * After fork(), a child must not use what its parent made: the functions then fail. It connects a
 * client of its own.
 */


#ifndef FARSIDE_H
#define FARSIDE_H

#include <stddef.h>
#include <stdint.h>

// The version of this header: the first number.
#define FARSIDE_VERSION_MAJOR 0

// The version of this header: the second number.
#define FARSIDE_VERSION_MINOR 1

// The version of this header: the third number.
#define FARSIDE_VERSION_PATCH 0

// A TTL: the value does not expire.
#define FARSIDE_FOREVER 0

// A TTL of farside_store_options: the value expires when the present one does.
#define FARSIDE_KEEP_TTL UINT64_MAX

// What a function returns: 0 for success, a positive number for another answer, a negative one for
// an error. After an error nothing was changed, except where the text says so.
typedef enum farside_status {
  // Done.
  FARSIDE_OK = 0,
  // The key is absent.
  FARSIDE_ABSENT = 1,
  // The condition of the store did not hold, and nothing was stored.
  FARSIDE_NOT_APPLIED = 2,
  // The buffer is too short. The value's length was returned.
  FARSIDE_TOO_SHORT = 3,
  // The pipeline has no free lane: take a completed operation first.
  FARSIDE_BUSY = 4,
  // From farside_pipeline_poll(): no operation has completed yet. From both that and
  // farside_pipeline_wait(): none is in flight.
  FARSIDE_NONE = 5,
  // An argument is NULL, or out of its range.
  FARSIDE_ERROR_ARGUMENT = -1,
  // The key is empty or too long, or the value too long.
  FARSIDE_ERROR_LENGTH = -2,
  // There is no room for the value or the key.
  FARSIDE_ERROR_OUT_OF_SPACE = -3,
  // The client is a reader.
  FARSIDE_ERROR_DENIED = -4,
  // Other clients changed the key under every attempt. Try again later.
  FARSIDE_ERROR_CONTENDED = -5,
  // The connection broke during a change. The change has taken effect, or never will. A get
  // shows which.
  FARSIDE_ERROR_INDETERMINATE = -6,
  // The value is not a number, or the sum does not fit.
  FARSIDE_ERROR_NUMBER = -7,
  // The region has content that the format does not allow.
  FARSIDE_ERROR_DAMAGED = -8,
  // The server cannot be reached, or does not answer.
  FARSIDE_ERROR_UNAVAILABLE = -9,
  // The server refused the client: its version, secret, role or number.
  FARSIDE_ERROR_REFUSED = -10,
  // The system refused memory, a thread or a descriptor.
  FARSIDE_ERROR_SYSTEM = -11,
  // The pipeline has lost its connection. Close it and open another one.
  FARSIDE_ERROR_DISCONNECTED = -12,
  // A defect of the library. A change may have taken effect. Close the session or pipeline: it
  // cannot be used any more.
  FARSIDE_ERROR_INTERNAL = -13,
} farside_status;

// When farside_store() stores a value.
typedef enum farside_condition {
  // Always.
  FARSIDE_ALWAYS = 0,
  // Only if the key is absent.
  FARSIDE_IF_ABSENT = 1,
  // Only if the key is present.
  FARSIDE_IF_PRESENT = 2,
  // Only if the key's value is `expected`.
  FARSIDE_IF_VALUE = 3,
  // Only if the key's version is `version`.
  FARSIDE_IF_VERSION = 4,
} farside_condition;

// Memory that an RDMA device accesses directly, so that long values are not copied. Any part of it
// can be the buffer of a get or the value of a put. Threads may use different parts at once.
typedef struct farside_buffer farside_buffer;

// A connection to a server or a cluster. Any number of sessions share it.
typedef struct farside_client farside_client;

// How a client connects.
typedef struct farside_options farside_options;

// Many operations in flight.
typedef struct farside_pipeline farside_pipeline;

// One thread's access to the store. Every call waits until its operation has completed.
typedef struct farside_session farside_session;

// How farside_store() stores a value. All zeros stand for a put. Set all of it to zero first:
// later versions may give `reserved` a meaning.
typedef struct farside_store_options {
  // A farside_condition.
  uint32_t condition;
  // If not 0, the value is never evicted.
  uint32_t pinned;
  // The TTL in milliseconds. FARSIDE_FOREVER: the value does not expire. FARSIDE_KEEP_TTL: it
  // expires when the present value does.
  uint64_t ttl_ms;
  // For FARSIDE_IF_VERSION: the version that the key must have.
  uint64_t version;
  // For FARSIDE_IF_VALUE: the value that the key must have.
  const void *expected;
  // The length of `expected`, in bytes.
  size_t expected_bytes;
  // Zeros.
  uint64_t reserved[2];
} farside_store_options;

// A key, and memory for its value.
typedef struct farside_get_entry {
  // The key.
  const void *key;
  // The length of the key, in bytes.
  size_t key_bytes;
  // The memory for the value.
  void *buffer;
  // The length of the memory, in bytes.
  size_t buffer_bytes;
  // The length of the value, in bytes. Set by the call.
  size_t value_bytes;
  // The version of the value. Set by the call.
  uint64_t version;
  // FARSIDE_OK, FARSIDE_ABSENT or FARSIDE_TOO_SHORT. Set by the call.
  int32_t status;
} farside_get_entry;

// A key and its value.
typedef struct farside_put_entry {
  // The key.
  const void *key;
  // The length of the key, in bytes.
  size_t key_bytes;
  // The value.
  const void *value;
  // The length of the value, in bytes.
  size_t value_bytes;
} farside_put_entry;

// A key.
typedef struct farside_key {
  // The key.
  const void *key;
  // The length of the key, in bytes.
  size_t key_bytes;
} farside_key;

// A completed operation of a pipeline.
typedef struct farside_completed {
  // The ticket that the operation got.
  uint64_t ticket;
  // The value of a get, valid until the pipeline is used again; NULL without one.
  const void *value;
  // The length of the value, in bytes.
  size_t value_bytes;
  // The version of the value that was found or stored; 0 if it is not known.
  uint64_t version;
  // The sum of an increment.
  int64_t number;
  // A farside_status, as the function for one key returns it. The text of an error is
  // farside_pipeline_error().
  int32_t status;
  // Zeros: later versions may give it a meaning.
  uint64_t reserved[2];
} farside_completed;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Returns the text of the calling thread's last error in a function without a session or pipeline:
// those that configure, connect, open a session or open a threaded pipeline. Also in a function
// whose session or pipeline was NULL. Valid until the thread's next such error; empty if there was
// none.
const char *farside_error(void);

// Returns the version of the library, such as "0.1.0".
const char *farside_version(void);

// Makes options with all defaults. Free them with farside_options_free().
struct farside_options *farside_options_new(void);

// Frees options. NULL is allowed.
void farside_options_free(struct farside_options *options);

// Sets the server's address, for example "shm:///run/farside/kv.sock". If the server has several,
// or for a cluster, write commas between them.
enum farside_status farside_options_server(struct farside_options *options, const char *server);

// Sets the shared secret. The client then uses only servers with the same one, which prove it.
enum farside_status farside_options_secret(struct farside_options *options, const char *secret);

// Makes the client a reader, which cannot change anything.
enum farside_status farside_options_read_only(struct farside_options *options);

// Sets how many operations a pipeline can have in flight: 1 to 1024, 64 by default.
// farside_connect() checks it.
enum farside_status farside_options_pipeline_depth(struct farside_options *options, uint16_t depth);

// Sets the size of the location cache in bytes, 64 MiB by default. 0 switches it off.
enum farside_status farside_options_cache_bytes(struct farside_options *options, size_t bytes);

// Sets the timeout for connecting in milliseconds, 3000 by default.
enum farside_status farside_options_connect_timeout_ms(struct farside_options *options,
                                                       uint64_t timeout_ms);

// Sets the files for TLS: the CA of the server's certificate, and a certificate and a key if the
// server wants them. Each may be NULL.
enum farside_status farside_options_tls(struct farside_options *options,
                                        const char *ca,
                                        const char *certificate,
                                        const char *key);

// Takes all settings from a configuration file, as `config/client.toml` describes it.
enum farside_status farside_options_file(struct farside_options *options, const char *path);

// Connects to a server or a cluster. The options stay the caller's. Free the client with
// farside_client_free().
enum farside_status farside_connect(const struct farside_options *options,
                                    struct farside_client **client);

// Frees a client. NULL is allowed. Its sessions and buffers can still be used.
void farside_client_free(struct farside_client *client);

// Opens a session. Close it with farside_session_close().
enum farside_status farside_session_open(const struct farside_client *client,
                                         struct farside_session **session);

// Closes a session. NULL is allowed. Its pipeline may be closed later. In a child of fork(), the
// session of the parent is only forgotten: its memory and descriptors stay.
void farside_session_close(struct farside_session *session);

// Returns the text of the session's last error. Valid until its next error; empty if there was
// none.
const char *farside_session_error(const struct farside_session *session);

// Copies the value of a key to a buffer, which may be NULL if it has no bytes. Stores the value's
// length and version, unless these are NULL; both are 0 with FARSIDE_ABSENT. FARSIDE_TOO_SHORT
// with the length if the buffer is too short. The rest of the buffer is undefined, and all of it
// after any other result than FARSIDE_OK.
//
// One READ and one round trip if the key's location is cached; two of each if not.
enum farside_status farside_get(struct farside_session *session,
                                const void *key,
                                size_t key_bytes,
                                void *buffer,
                                size_t buffer_bytes,
                                size_t *value_bytes,
                                uint64_t *version);

// Stores a value, whether or not the key is present.
//
// One round trip if the key's location is cached, two if not, three if the key is absent.
enum farside_status farside_put(struct farside_session *session,
                                const void *key,
                                size_t key_bytes,
                                const void *value,
                                size_t value_bytes);

// Stores a value with a condition, a TTL, or both. Without options (NULL) it is a put. Stores the
// version of the value, unless that is NULL; 0 if another client has replaced the value already.
// FARSIDE_NOT_APPLIED if the condition did not hold.
//
// Round trips as for farside_put(); with FARSIDE_IF_VALUE, FARSIDE_IF_VERSION and FARSIDE_KEEP_TTL
// two if the key's location is cached, and three if not.
enum farside_status farside_store(struct farside_session *session,
                                  const void *key,
                                  size_t key_bytes,
                                  const void *value,
                                  size_t value_bytes,
                                  const struct farside_store_options *options,
                                  uint64_t *version);

// Removes a key. FARSIDE_ABSENT if it was absent.
//
// One round trip if the key's location is cached, two if not.
enum farside_status farside_delete(struct farside_session *session,
                                   const void *key,
                                   size_t key_bytes);

// Returns FARSIDE_OK if the key is present, and FARSIDE_ABSENT if not. Round trips as for
// farside_get().
enum farside_status farside_exists(struct farside_session *session,
                                   const void *key,
                                   size_t key_bytes);

// Removes a key if it has this version. FARSIDE_ABSENT if it has another one or is absent.
//
// Two round trips if the key's location is cached, three if not.
enum farside_status farside_delete_if_version(struct farside_session *session,
                                              const void *key,
                                              size_t key_bytes,
                                              uint64_t version);

// Makes the value of a key expire after `ttl_ms` milliseconds, at least 1. FARSIDE_ABSENT if the
// key is absent.
//
// Two round trips if the key's location is cached, three if not.
enum farside_status farside_touch(struct farside_session *session,
                                  const void *key,
                                  size_t key_bytes,
                                  uint64_t ttl_ms);

// Makes the value of a key stay forever. FARSIDE_ABSENT if the key is absent. Round trips as for
// farside_touch().
enum farside_status farside_persist(struct farside_session *session,
                                    const void *key,
                                    size_t key_bytes);

// Adds `delta` to the decimal number that is the key's value. An absent key counts as 0. Stores
// the sum, unless that is NULL. Round trips as for farside_touch().
enum farside_status farside_increment(struct farside_session *session,
                                      const void *key,
                                      size_t key_bytes,
                                      int64_t delta,
                                      int64_t *sum);

// Appends bytes to the value of a key. An absent key counts as an empty value. Stores the new
// length, unless that is NULL. Round trips as for farside_touch().
enum farside_status farside_append(struct farside_session *session,
                                   const void *key,
                                   size_t key_bytes,
                                   const void *more,
                                   size_t more_bytes,
                                   size_t *value_bytes);

// Stores in how many milliseconds the value expires, at least 1, or FARSIDE_FOREVER.
// FARSIDE_ABSENT if the key is absent. Round trips as for farside_get().
enum farside_status farside_ttl_ms(struct farside_session *session,
                                   const void *key,
                                   size_t key_bytes,
                                   uint64_t *ttl_ms);

// Stores the version of the key's value. FARSIDE_ABSENT if the key is absent. Round trips as for
// farside_get().
enum farside_status farside_key_version(struct farside_session *session,
                                        const void *key,
                                        size_t key_bytes,
                                        uint64_t *version);

// Copies the values of several keys to the memory of their entries, and sets `value_bytes`,
// `version` and `status` of each entry. The rest of the memory is undefined, and all of it after
// FARSIDE_ABSENT, FARSIDE_TOO_SHORT or an error. After an error the entries are undefined, too.
//
// The READs share doorbells: one round trip for up to as many keys as the pipeline is deep, if
// their locations are cached; two if not.
enum farside_status farside_get_many(struct farside_session *session,
                                     struct farside_get_entry *entries,
                                     size_t count);

// Stores several values, which share doorbells. Each store is atomic; the call as a whole is not.
// After an error, any of the stores may have taken effect.
enum farside_status farside_put_many(struct farside_session *session,
                                     const struct farside_put_entry *entries,
                                     size_t count);

// Removes several keys, with operations that share doorbells. Stores how many keys were present,
// unless that is NULL. After an error, any of the keys may have been removed.
enum farside_status farside_delete_many(struct farside_session *session,
                                        const struct farside_key *entries,
                                        size_t count,
                                        uint64_t *deleted);

// Opens a pipeline that the caller drives: operations advance only in farside_pipeline_poll(),
// farside_pipeline_wait() and farside_pipeline_close(). Until the pipeline is closed, operations
// on the session fail. The text of an error of this function is farside_session_error().
enum farside_status farside_pipeline_open(struct farside_session *session,
                                          struct farside_pipeline **pipeline);

// Opens a pipeline that a thread of the library drives. Its farside_pipeline_event_fd() tells that
// operations have completed, for poll(), epoll and event loops. Starting an operation copies key
// and value to the heap. Close it with farside_pipeline_close(); its thread ends soon after. The
// text of an error of this function is farside_error().
enum farside_status farside_pipeline_open_threaded(const struct farside_client *client,
                                                   struct farside_pipeline **pipeline);

// Completes the operations in flight, and closes the pipeline. May wait for the server. The
// results are lost. Remove the descriptor from epoll before. NULL is allowed.
void farside_pipeline_close(struct farside_pipeline *pipeline);

// Returns the descriptor of a pipeline that a thread drives; -1 for any other. It is readable
// while there are completed operations, and may be readable without one: call
// farside_pipeline_poll() until FARSIDE_NONE. Do not read or close the descriptor.
int farside_pipeline_event_fd(const struct farside_pipeline *pipeline);

// Returns the text of the pipeline's last error, also of an operation. Valid until its next error;
// empty if there was none.
const char *farside_pipeline_error(const struct farside_pipeline *pipeline);

// Starts a get, which copies the key, and stores its ticket, unless that is NULL. FARSIDE_BUSY if
// no lane is free: then take a completed operation first. A pipeline that a thread drives has
// 16384 lanes.
enum farside_status farside_pipeline_get(struct farside_pipeline *pipeline,
                                         const void *key,
                                         size_t key_bytes,
                                         uint64_t *ticket);

// Starts a delete. Otherwise as farside_pipeline_get().
enum farside_status farside_pipeline_delete(struct farside_pipeline *pipeline,
                                            const void *key,
                                            size_t key_bytes,
                                            uint64_t *ticket);

// Starts a delete of a key with this version. Otherwise as farside_pipeline_get().
enum farside_status farside_pipeline_delete_if_version(struct farside_pipeline *pipeline,
                                                       const void *key,
                                                       size_t key_bytes,
                                                       uint64_t version,
                                                       uint64_t *ticket);

// Starts an increment. Otherwise as farside_pipeline_get().
enum farside_status farside_pipeline_increment(struct farside_pipeline *pipeline,
                                               const void *key,
                                               size_t key_bytes,
                                               int64_t delta,
                                               uint64_t *ticket);

// Starts a touch. Otherwise as farside_pipeline_get().
enum farside_status farside_pipeline_touch(struct farside_pipeline *pipeline,
                                           const void *key,
                                           size_t key_bytes,
                                           uint64_t ttl_ms,
                                           uint64_t *ticket);

// Starts a store, as farside_store(). Otherwise as farside_pipeline_get().
enum farside_status farside_pipeline_store(struct farside_pipeline *pipeline,
                                           const void *key,
                                           size_t key_bytes,
                                           const void *value,
                                           size_t value_bytes,
                                           const struct farside_store_options *options,
                                           uint64_t *ticket);

// Takes a completed operation, and copies it to `completed`. Does not wait: FARSIDE_NONE if there
// is none.
enum farside_status farside_pipeline_poll(struct farside_pipeline *pipeline,
                                          struct farside_completed *completed);

// Waits for a completed operation, and copies it to `completed`. FARSIDE_NONE if none is in
// flight.
enum farside_status farside_pipeline_wait(struct farside_pipeline *pipeline,
                                          struct farside_completed *completed);

// Makes a buffer of `bytes` zero bytes. Free it with farside_buffer_free(). The text of an error
// is farside_error().
enum farside_status farside_buffer_new(const struct farside_client *client,
                                       size_t bytes,
                                       struct farside_buffer **buffer);

// Returns the first byte of a buffer. NULL for NULL, and in a child of fork(), which does not have
// the memory.
void *farside_buffer_data(const struct farside_buffer *buffer);

// Returns the length of a buffer in bytes; 0 where farside_buffer_data() is NULL.
size_t farside_buffer_bytes(const struct farside_buffer *buffer);

// Frees a buffer. NULL is allowed.
void farside_buffer_free(struct farside_buffer *buffer);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* FARSIDE_H */
