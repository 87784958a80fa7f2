/* What native.py offers: see there. */

static PyObject *identify(PyObject *module, PyObject *tensors) {
    PyObject *items = PySequence_Tuple(tensors);
    if (!items)
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(items);
    Numbers traits = {0};
    PyObject *result = NULL, *addresses = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int64_t));
    if (!addresses)
        goto done;
    int64_t *address = (int64_t *)PyBytes_AS_STRING(addresses), words[WORDS];
    for (Py_ssize_t i = 0; i < count; i++) {
        int used = describe(PyTuple_GET_ITEM(items, i), address + i, words);
        if (append(&traits, words, used))
            goto done;
    }
    result = Py_BuildValue(
        "Oy#", addresses, traits.data ? (char *)traits.data : "", (Py_ssize_t)(traits.used * sizeof(int64_t)));
done:
    PyMem_Free(traits.data);
    Py_XDECREF(addresses);
    Py_DECREF(items);
    return result;
}

/* write numbers down as float32; 0 if one is neither a float nor an int, -1 with an exception */
static int write_down(float *out, PyObject *numbers) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(numbers); i++) {
        PyObject *item = PyTuple_GET_ITEM(numbers, i);
        if (!PyFloat_Check(item) && !PyLong_Check(item))
            return 0;
        double number = PyFloat_AsDouble(item);
        out[i] = (float)number;
        if (number == -1 && PyErr_Occurred())
            return -1;
    }
    return 1;
}

/* put 0 in one column of rows; the number that they have there as a float, NULL if not all have the same or with an
   exception */
static PyObject *take_out(float *numbers, Py_ssize_t rows, Py_ssize_t width, Py_ssize_t column, PyObject *first) {
    if (column < 0 || column >= PyTuple_GET_SIZE(first))
        return PyErr_Format(PyExc_IndexError, "no column %zd", column);
    for (Py_ssize_t i = rows - 1; i >= 0; i--) {
        if (memcmp(numbers + i * width + column, numbers + column, sizeof(float)))
            return NULL;
        numbers[i * width + column] = 0;
    }
    return PyNumber_Float(PyTuple_GET_ITEM(first, column));
}

static PyObject *pack(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    if (given != 3 || !PyList_Check(args[0]) || !PyTuple_Check(args[1]) || !PyTuple_Check(args[2]))
        return PyErr_Format(PyExc_TypeError, "pack takes a list of tuples, and two tuples");
    PyObject *rows = args[0], *last = args[1], *columns = args[2];
    PyObject *first = PyList_GET_SIZE(rows) ? PyList_GET_ITEM(rows, 0) : last;
    Py_ssize_t head = PyTuple_Check(first) ? PyTuple_GET_SIZE(first) : 0, width = head + PyTuple_GET_SIZE(last);
    PyObject *data = PyBytes_FromStringAndSize(NULL, PyList_GET_SIZE(rows) * width * (Py_ssize_t)sizeof(float));
    PyObject *shared = PyTuple_New(PyTuple_GET_SIZE(columns)), *result = NULL;
    int good = data && shared ? 1 : -1;
    float *numbers = data ? (float *)PyBytes_AS_STRING(data) : NULL;
    for (Py_ssize_t i = 0; good == 1 && i < PyList_GET_SIZE(rows); i++) {
        PyObject *row = PyList_GET_ITEM(rows, i);
        if (!PyTuple_Check(row) || PyTuple_GET_SIZE(row) != head) {
            PyErr_Format(PyExc_TypeError, "pack takes rows that are tuples of one length");
            good = -1;
        } else if ((good = write_down(numbers + i * width, row)) == 1)
            good = write_down(numbers + i * width + head, last);
    }
    for (Py_ssize_t i = 0; good == 1 && i < PyTuple_GET_SIZE(columns); i++) {
        Py_ssize_t column = PyLong_AsSsize_t(PyTuple_GET_ITEM(columns, i));
        PyObject *number = take_out(numbers, PyList_GET_SIZE(rows), width, column, first);
        good = number ? 1 : PyErr_Occurred() ? -1 : 0;
        PyTuple_SET_ITEM(shared, i, number);
    }
    if (good == 1)
        result = PyTuple_Pack(2, data, shared);
    else if (good == 0)
        result = Py_NewRef(Py_None);
    Py_XDECREF(data);
    Py_XDECREF(shared);
    return result;
}

static PyObject *version_sum(PyObject *module, PyObject *tensors) {
    PyObject *items = PySequence_Tuple(tensors);
    if (!items)
        return NULL;
    long long sum = 0;
    int failed = 0;
    for (Py_ssize_t i = 0; !failed && i < PyTuple_GET_SIZE(items); i++)
        failed = add_version(PyTuple_GET_ITEM(items, i), &sum);
    Py_DECREF(items);
    return failed ? NULL : PyLong_FromLongLong(sum);
}

/* -1 with an exception */
static int find(Attribute *attribute, const char *name) {
    PyObject *own = PyObject_GetAttrString((PyObject *)tensor_type, name);
    attribute->name = PyUnicode_InternFromString(name);
    if (own && Py_IS_TYPE(own, &PyGetSetDescr_Type))
        attribute->own = ((PyGetSetDescrObject *)own)->d_getset;
    else if (own)
        PyErr_Format(PyExc_ImportError, "%s of torch.Tensor is no attribute in C", name);
    /* own stays: it is the class's, for as long as there is one */
    return own && attribute->name && attribute->own ? 0 : -1;
}

/* take torch.Tensor, torch.nn.Parameter, the addresses of torch's functions, and where the at::Tensor of a tensor is */
static PyObject *bind(PyObject *module, PyObject *args) {
    Py_buffer functions;
    if (!PyArg_ParseTuple(
            args, "O!O!y*n", &PyType_Type, &tensor_type, &PyType_Type, &parameter_type, &functions, &handle_at))
        return NULL;
    int fit = functions.len == sizeof shim;
    if (fit)
        memcpy(&shim, functions.buf, sizeof shim);
    PyBuffer_Release(&functions);
    if (!fit)
        return PyErr_Format(PyExc_TypeError, "bind takes %zu addresses", sizeof shim / sizeof(void *));
    Py_INCREF(tensor_type);
    Py_INCREF(parameter_type);
    if (find(&grad, "grad") || find(&version, "_version"))
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"identify", identify, METH_O, NULL},
    {"pack", (PyCFunction)(void (*)(void))pack, METH_FASTCALL, NULL},
    {"version_sum", version_sum, METH_O, NULL},
    {"bind", bind, METH_VARARGS, NULL},
    {NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fused_lwlr_native", NULL, -1, methods};

PyMODINIT_FUNC PyInit_fused_lwlr_native(void) {
    is_conj = PyUnicode_InternFromString("is_conj");
    is_neg = PyUnicode_InternFromString("is_neg");
    PyObject *module = is_conj && is_neg ? PyModule_Create(&definition) : NULL;
    if (module && PyModule_AddType(module, &watch_type))
        Py_CLEAR(module);
    return module;
}
