/* A look at every tensor of a step in one pass: most of the time goes into fetching them from memory. */

typedef struct {
    PyObject_HEAD
    /* what there was: of each parameter its object, address and description, of each entry of the state its address */
    Numbers params, state;
    /* of the entries, a tuple */
    PyObject *names;
} Watch;

/* whether numbers go on, from a place that is moved along, with these words */
static int goes_on(const Numbers *numbers, size_t *at, const int64_t *words, int count) {
    if (numbers->used - *at < (size_t)count || memcmp(numbers->data + *at, words, (size_t)count * sizeof *words))
        return 0;
    *at += (size_t)count;
    return 1;
}

/* the words that a parameter is known by; -1 with an exception */
static int describe_param(PyObject *param, int64_t *words) {
    words[0] = (int64_t)param;
    int count = describe(param, words + 1, words + 2);
    return count < 0 ? -1 : count + 2;
}

/* 0 for an entry that is no tensor or not there; -1 with an exception */
static int find_entry(PyObject *state, PyObject *name, int64_t *address) {
    Handle handle;
    PyObject *entry = PyDict_Check(state) ? PyDict_GetItemWithError(state, name) : NULL;
    *address = 0;
    if (!entry)
        return PyErr_Occurred() ? -1 : 0;
    return PyObject_TypeCheck(entry, tensor_type) ? locate(entry, &handle, address) : 0;
}

/* the next value of a dict, a new reference; NULL after the last */
static PyObject *next_of(PyObject *dict, Py_ssize_t *place) {
    PyObject *key, *value;
    return PyDict_Next(dict, place, &key, &value) ? Py_NewRef(value) : NULL;
}

/* write down what there is; -1 with an exception */
static int learn(Watch *self, PyObject *params, PyObject *states) {
    int64_t words[2 + WORDS], address;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(params); i++)
        if (append(&self->params, words, describe_param(PyTuple_GET_ITEM(params, i), words)))
            return -1;
    Py_ssize_t place = 0;
    for (PyObject *state; (state = next_of(states, &place)); Py_DECREF(state))
        for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(self->names); j++)
            if (find_entry(state, PyTuple_GET_ITEM(self->names, j), &address) || append(&self->state, &address, 1)) {
                Py_DECREF(state);
                return -1;
            }
    return 0;
}

/* how far a look has come in what there was, and what it found */
typedef struct {
    size_t param, entry;
    Py_ssize_t gradients;
    /* of each parameter whether it has a gradient; of each that has, it and its address */
    PyObject *present, *grads, *addresses;
    int alike, count_versions;
    long long versions;
} Progress;

/* 1 if parameter number i is what it was, 0 if not; -1 with an exception. Takes the reference to its gradient. */
static int see_param(Watch *self, Progress *progress, Py_ssize_t i, PyObject *param, PyObject *gradient) {
    int64_t words[2 + WORDS], its[WORDS];
    int count = describe_param(param, words);
    int same = count < 0 ? -1 : goes_on(&self->params, &progress->param, words, count);
    PyBytes_AS_STRING(progress->present)[i] = gradient != Py_None;
    if (same != 1 || gradient == Py_None) {
        Py_DECREF(gradient);
        return same;
    }
    Py_ssize_t place = progress->gradients++;
    PyTuple_SET_ITEM(progress->grads, place, gradient);
    int length = describe(gradient, (int64_t *)PyBytes_AS_STRING(progress->addresses) + place, its);
    /* after its object and address, a parameter is described as a gradient is */
    if (!Py_IS_TYPE(gradient, tensor_type) || length != count - 2 ||
        memcmp(its, words + 2, (size_t)length * sizeof *its))
        progress->alike = 0;
    return length < 0 || (progress->count_versions && add_version(param, &progress->versions)) ? -1 : 1;
}

/* 1 if the entries of a state are where they were, 0 if not; -1 with an exception. Takes the reference to it. */
static int see_state(Watch *self, Progress *progress, PyObject *state) {
    int64_t address;
    int same = 1;
    for (Py_ssize_t j = 0; same == 1 && j < PyTuple_GET_SIZE(self->names); j++)
        same = find_entry(state, PyTuple_GET_ITEM(self->names, j), &address)
                   ? -1
                   : goes_on(&self->state, &progress->entry, &address, 1);
    Py_DECREF(state);
    return same;
}

/* 1 if all is what it was but for the gradients, which are found, 0 if not; -1 with an exception */
static int see(Watch *self, Progress *progress, PyObject *params, PyObject *grads, PyObject *states) {
    Py_ssize_t rows = PyTuple_GET_SIZE(params), place = 0;
    int same = !grads || PyTuple_GET_SIZE(grads) == rows;
    progress->present = PyBytes_FromStringAndSize(NULL, rows);
    progress->grads = PyTuple_New(rows);
    progress->addresses = PyBytes_FromStringAndSize(NULL, rows * (Py_ssize_t)sizeof(int64_t));
    if (!progress->present || !progress->grads || !progress->addresses)
        return -1;
    PyObject *state;
    for (Py_ssize_t i = 0; same == 1 && i < rows; i++) {
        PyObject *param = PyTuple_GET_ITEM(params, i);
        PyObject *gradient = grads ? Py_NewRef(PyTuple_GET_ITEM(grads, i)) : get(param, &grad);
        same = gradient ? see_param(self, progress, i, param, gradient) : -1;
        /* there are about as many as parameters, in about the same order */
        if (same == 1 && (state = next_of(states, &place)))
            same = see_state(self, progress, state);
    }
    while (same == 1 && (state = next_of(states, &place)))
        same = see_state(self, progress, state);
    if (same != 1)
        return same;
    if (progress->param != self->params.used || progress->entry != self->state.used)
        return 0;
    if (progress->gradients == rows)
        return 1;
    Py_ssize_t size = progress->gradients * (Py_ssize_t)sizeof(int64_t);
    if (_PyTuple_Resize(&progress->grads, progress->gradients) || _PyBytes_Resize(&progress->addresses, size))
        return -1;
    return 1;
}

static PyObject *look(Watch *self, PyObject *const *args, Py_ssize_t given) {
    if (given != 4)
        return PyErr_Format(PyExc_TypeError, "look takes parameters, gradients or None, states, and a bool");
    /* another type of mapping has taken the place of the dict */
    if (!PyDict_Check(args[2]))
        Py_RETURN_NONE;
    Progress progress = {.alike = 1, .count_versions = args[3] == Py_True};
    PyObject *result = NULL, *params = PySequence_Tuple(args[0]);
    PyObject *grads = params && args[1] != Py_None ? PySequence_Tuple(args[1]) : NULL;
    int same = params && (grads || args[1] == Py_None) ? see(self, &progress, params, grads, args[2]) : -1;
    PyObject *versions = progress.count_versions ? PyLong_FromLongLong(progress.versions) : Py_NewRef(Py_None);
    if (same == 1 && versions)
        result = PyTuple_Pack(4, progress.present, progress.grads,
                              progress.alike ? progress.addresses : Py_None, versions);
    else if (same == 0)
        result = Py_NewRef(Py_None);
    Py_XDECREF(versions);
    Py_XDECREF(progress.present);
    Py_XDECREF(progress.grads);
    Py_XDECREF(progress.addresses);
    Py_XDECREF(params);
    Py_XDECREF(grads);
    return result;
}

static PyObject *new_watch(PyTypeObject *type, PyObject *args, PyObject *options) {
    PyObject *params, *states, *names;
    if (!PyArg_ParseTuple(args, "O!O!O!", &PyTuple_Type, &params, &PyDict_Type, &states, &PyTuple_Type, &names))
        return NULL;
    Watch *self = (Watch *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->names = Py_NewRef(names);
    if (learn(self, params, states))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void delete_watch(Watch *self) {
    PyMem_Free(self->params.data);
    PyMem_Free(self->state.data);
    Py_XDECREF(self->names);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef watch_methods[] = {
    {"look", (PyCFunction)(void (*)(void))look, METH_FASTCALL, NULL},
    {NULL},
};
static PyTypeObject watch_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "fused_lwlr_native.Watch",
    .tp_basicsize = sizeof(Watch),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = new_watch,
    .tp_dealloc = (destructor)delete_watch,
    .tp_methods = watch_methods,
};
