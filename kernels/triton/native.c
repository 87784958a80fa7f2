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

static PyObject *pack(PyObject *module, PyObject *numbers) {
    PyObject *items = PySequence_Tuple(numbers);
    Py_ssize_t count = items ? PyTuple_GET_SIZE(items) : 0;
    PyObject *result = items ? PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(float)) : NULL;
    for (Py_ssize_t i = 0; result && i < count; i++) {
        PyObject *item = PyTuple_GET_ITEM(items, i);
        if (!PyFloat_Check(item) && !PyLong_Check(item)) {
            Py_SETREF(result, Py_NewRef(Py_None));
            break;
        }
        double number = PyFloat_AsDouble(item);
        ((float *)PyBytes_AS_STRING(result))[i] = (float)number;
        if (number == -1 && PyErr_Occurred())
            Py_CLEAR(result);
    }
    Py_XDECREF(items);
    return result;
}

static PyObject *version_sum(PyObject *module, PyObject *tensors) {
    PyObject *items = PySequence_Tuple(tensors);
    if (!items)
        return NULL;
    long long sum = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items); i++) {
        PyObject *one = get(PyTuple_GET_ITEM(items, i), &version);
        sum += one ? PyLong_AsLongLong(one) : 0;
        Py_XDECREF(one);
        if (PyErr_Occurred())
            break;
    }
    Py_DECREF(items);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(sum);
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

/* take torch.Tensor, with its functions, and torch.nn.Parameter */
static PyObject *bind(PyObject *module, PyObject *const *types, Py_ssize_t given) {
    if (given != 2 || !PyType_Check(types[0]) || !PyType_Check(types[1]))
        return PyErr_Format(PyExc_TypeError, "bind takes torch.Tensor and torch.nn.Parameter");
    PyObject *capsule = PyObject_GetAttrString(types[0], "__dlpack_c_exchange_api__");
    api = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    Py_XDECREF(capsule);
    if (!api)
        return NULL;
    if (api->header.major != MAJOR || !api->view)
        return PyErr_Format(PyExc_ImportError, "this torch does not have version %d of DLPack", MAJOR);
    tensor_type = (PyTypeObject *)Py_NewRef(types[0]);
    parameter_type = (PyTypeObject *)Py_NewRef(types[1]);
    if (find(&grad, "grad") || find(&version, "_version"))
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"identify", identify, METH_O, NULL},
    {"pack", pack, METH_O, NULL},
    {"version_sum", version_sum, METH_O, NULL},
    {"bind", (PyCFunction)(void (*)(void))bind, METH_FASTCALL, NULL},
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
