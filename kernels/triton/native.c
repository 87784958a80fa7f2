/* Loops over all tensors of a step: see native.py. Tensors are looked at through the C functions of DLPack. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* of dlpack.h, version 1.3, whose structs stay as they are within a major version */
typedef struct {
    void *data;
    struct { int32_t type, id; } device;
    int32_t ndim;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    struct { uint32_t major, minor; void *previous; } header;
    void *allocate, *from_tensor, *to_tensor;
    /* borrows; -1 and a Python exception for what has no memory */
    int (*view)(void *tensor, DLTensor *out);
    void *stream;
} DLPackExchangeAPI;

enum { MAJOR = 1, COMPLEX = 5 };

static const DLPackExchangeAPI *api;
static PyTypeObject *tensor_type;
static PyTypeObject *parameter_type;
static PyObject *is_conj, *is_neg;

/* an attribute of tensors, and how torch's own classes get it */
typedef struct {
    PyObject *name;
    const PyGetSetDef *own;
} Attribute;
static Attribute grad, version;

/* int64 numbers, as many as there come to be */
typedef struct {
    int64_t *data;
    size_t used, room;
} Numbers;

static int reserve(Numbers *numbers, size_t more) {
    if (numbers->used + more <= numbers->room)
        return 0;
    size_t room = 2 * (numbers->used + more);
    int64_t *data = PyMem_Realloc(numbers->data, room * sizeof(int64_t));
    if (!data) {
        PyErr_NoMemory();
        return -1;
    }
    numbers->data = data;
    numbers->room = room;
    return 0;
}

/* a new reference; NULL with an exception */
static PyObject *get(PyObject *tensor, const Attribute *attribute) {
    if (Py_IS_TYPE(tensor, parameter_type) || Py_IS_TYPE(tensor, tensor_type))
        return attribute->own->get(tensor, attribute->own->closure);
    return PyObject_GetAttr(tensor, attribute->name);
}

/* whether a method of the tensor says yes; -1 with an exception */
static int says(PyObject *tensor, PyObject *method) {
    PyObject *answer = PyObject_CallMethodNoArgs(tensor, method);
    int yes = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return yes;
}

/* whether memory holds the conjugate or the negative of what the tensor means; -1 with an exception */
static int is_lazy(PyObject *tensor, const DLTensor *view) {
    if (view->dtype.code == COMPLEX)
        return says(tensor, is_conj);
    /* a lazy negative is the imaginary part of a lazy conjugate, whose elements are never next to each other */
    for (int32_t i = 0; i < view->ndim; i++)
        if (view->strides[i] == 1 && view->shape[i] > 1)
            return 0;
    return says(tensor, is_neg);
}

/* 0 of what is empty */
static int64_t address_of(const DLTensor *view) {
    return view->data ? (int64_t)view->data + (int64_t)view->byte_offset : 0;
}

/* append what the tensor is, and say where; -1 with an exception */
static int add(PyObject *tensor, int objects, int64_t *address, Numbers *traits) {
    *address = 0;
    if (tensor == Py_None) {
        if (reserve(traits, 1))
            return -1;
        traits->data[traits->used++] = -1;
        return 0;
    }
    DLTensor view;
    if (api->view(tensor, &view) || reserve(traits, 6 + 2 * (size_t)view.ndim))
        return -1;
    int lazy = is_lazy(tensor, &view);
    if (lazy < 0)
        return -1;
    *address = address_of(&view);
    int64_t *out = traits->data + traits->used;
    *out++ = view.ndim;
    *out++ = (int64_t)view.dtype.code << 32 | view.dtype.bits << 16 | view.dtype.lanes;
    *out++ = view.device.type;
    *out++ = view.device.id;
    *out++ = lazy;
    *out++ = objects ? (int64_t)tensor : 0;
    for (int32_t i = 0; i < view.ndim; i++) {
        *out++ = view.shape[i];
        *out++ = view.strides[i];
    }
    traits->used = (size_t)(out - traits->data);
    return 0;
}

static PyObject *identify(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    if (given != 2)
        return PyErr_Format(PyExc_TypeError, "identify takes 2 arguments, but %zd were given", given);
    PyObject *items = PySequence_Tuple(args[0]);
    if (!items)
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(items);
    int objects = PyObject_IsTrue(args[1]);
    Numbers traits = {0};
    PyObject *result = NULL, *addresses = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int64_t));
    if (objects < 0 || !addresses || reserve(&traits, 10 * (size_t)count))
        goto done;
    int64_t *address = (int64_t *)PyBytes_AS_STRING(addresses);
    for (Py_ssize_t i = 0; i < count; i++)
        if (add(PyTuple_GET_ITEM(items, i), objects, address + i, &traits))
            goto done;
    result = Py_BuildValue(
        "Oy#", addresses, traits.data ? (char *)traits.data : "", (Py_ssize_t)(traits.used * sizeof(int64_t)));
done:
    PyMem_Free(traits.data);
    Py_XDECREF(addresses);
    Py_DECREF(items);
    return result;
}

static PyObject *entry_addresses(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    if (given != 2)
        return PyErr_Format(PyExc_TypeError, "entry_addresses takes 2 arguments, but %zd were given", given);
    PyObject *result = NULL, *states = PySequence_Tuple(args[0]), *names = states ? PySequence_Tuple(args[1]) : NULL;
    if (!names)
        goto done;
    Py_ssize_t rows = PyTuple_GET_SIZE(states), width = PyTuple_GET_SIZE(names);
    PyObject *addresses = PyBytes_FromStringAndSize(NULL, rows * width * (Py_ssize_t)sizeof(int64_t));
    if (!addresses)
        goto done;
    int64_t *address = (int64_t *)PyBytes_AS_STRING(addresses);
    for (Py_ssize_t i = 0; i < rows; i++)
        for (Py_ssize_t j = 0; j < width; j++) {
            PyObject *entry = PyDict_GetItemWithError(PyTuple_GET_ITEM(states, i), PyTuple_GET_ITEM(names, j));
            DLTensor view = {0};
            if (!entry && PyErr_Occurred())
                goto failed;
            if (entry && PyObject_TypeCheck(entry, tensor_type) && api->view(entry, &view))
                goto failed;
            *address++ = address_of(&view);
        }
    result = addresses;
    goto done;
failed:
    Py_DECREF(addresses);
done:
    Py_XDECREF(states);
    Py_XDECREF(names);
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

static PyObject *gradients(PyObject *module, PyObject *params) {
    PyObject *items = PySequence_Tuple(params);
    PyObject *result = items ? PyList_New(PyTuple_GET_SIZE(items)) : NULL;
    for (Py_ssize_t i = 0; result && i < PyTuple_GET_SIZE(items); i++) {
        PyObject *one = get(PyTuple_GET_ITEM(items, i), &grad);
        if (one)
            PyList_SET_ITEM(result, i, one);
        else
            Py_CLEAR(result);
    }
    Py_XDECREF(items);
    return result;
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
    {"identify", (PyCFunction)(void (*)(void))identify, METH_FASTCALL, NULL},
    {"entry_addresses", (PyCFunction)(void (*)(void))entry_addresses, METH_FASTCALL, NULL},
    {"version_sum", version_sum, METH_O, NULL},
    {"gradients", gradients, METH_O, NULL},
    {"bind", (PyCFunction)(void (*)(void))bind, METH_FASTCALL, NULL},
    {NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fused_lwlr_native", NULL, -1, methods};

PyMODINIT_FUNC PyInit_fused_lwlr_native(void) {
    is_conj = PyUnicode_InternFromString("is_conj");
    is_neg = PyUnicode_InternFromString("is_neg");
    return is_conj && is_neg ? PyModule_Create(&definition) : NULL;
}
