/* A look at all parameters, gradients and state entries before a step, see look.py.

   Tensors are read through the C functions that torch keeps stable for models compiled ahead of time (torch's
   aoti_torch/c/shim.h). One pass reads each tensor once: most of the time goes into fetching tensors from memory. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* The address of an at::Tensor, which these functions take. */
typedef char *Handle;

/* The functions, in the order of GETTERS in look.py. Each returns 0 on success. */
static struct {
    int32_t (*layout)(Handle, int32_t *), (*dtype)(Handle, int32_t *);
    int32_t (*device_type)(Handle, int32_t *), (*device_index)(Handle, int32_t *);
    int32_t (*data_ptr)(Handle, int64_t *), (*storage_offset)(Handle, int64_t *);
    int32_t (*numel)(Handle, int64_t *), (*dim)(Handle, int64_t *);
    int32_t (*sizes)(Handle, int64_t **), (*strides)(Handle, int64_t **);
} torch;

/* Numbers of c10::Layout and c10::ScalarType, and the largest size of an element in bytes. */
enum { STRIDED = 0, FIRST_COMPLEX = 8, LAST_COMPLEX = 10, MAX_ITEMSIZE = 16 };

/* A descriptor: the number of dimensions, dtype, device type and index, lazy bits, and all sizes and strides. */
enum { MAX_DIMS = 64, HEAD = 5, MAX_WORDS = HEAD + 2 * MAX_DIMS };

/* The offset of the at::Tensor in a Python tensor. */
static Py_ssize_t handle_offset;
static PyTypeObject *tensor_type, *parameter_type;
static PyObject *grad_name, *is_conj_name, *is_neg_name;
/* The getter of torch.Tensor.grad. */
static const PyGetSetDef *own_grad;

/* Returns a new reference to the gradient of a parameter, or NULL with an exception set. */
static PyObject *get_grad(PyObject *param) {
    if (Py_IS_TYPE(param, parameter_type) || Py_IS_TYPE(param, tensor_type))
        return own_grad->get(param, own_grad->closure);
    return PyObject_GetAttr(param, grad_name);
}

/* Returns 1 if a method of the tensor returns a true value, 0 if not, -1 with an exception set. */
static int is_true(PyObject *tensor, PyObject *method) {
    PyObject *answer = PyObject_CallMethodNoArgs(tensor, method);
    int yes = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return yes;
}

/* Returns the lazy bits: 1 for a lazy negative, 2 for a lazy conjugate; -1 with an exception set. */
static int lazy_bits(PyObject *tensor, int32_t dtype) {
    int conj = dtype >= FIRST_COMPLEX && dtype <= LAST_COMPLEX ? is_true(tensor, is_conj_name) : 0;
    int neg = conj < 0 ? -1 : is_true(tensor, is_neg_name);
    return neg < 0 ? -1 : neg + 2 * conj;
}

/* Finds the handle and the address of a tensor; an empty tensor has the address 0. Returns 0 on success, -1 with an
   exception set if the tensor has elements but no memory. */
static int locate(PyObject *tensor, Handle *handle, int64_t *address) {
    int32_t layout;
    int64_t offset, numel;
    *handle = (Handle)tensor + handle_offset;
    /* torch prints an error when a sparse tensor is asked for its data pointer, so the layout comes first. */
    if (PyObject_TypeCheck(tensor, tensor_type) && !torch.layout(*handle, &layout) && layout == STRIDED &&
        !torch.data_ptr(*handle, address) && !torch.storage_offset(*handle, &offset)) {
        /* Without memory, the data pointer is the storage offset in bytes. */
        if (*address > MAX_ITEMSIZE * offset)
            return 0;
        *address = 0;
        if (!torch.numel(*handle, &numel) && numel == 0)
            return 0;
    }
    PyErr_SetString(PyExc_RuntimeError, "expected tensors with a data pointer");
    return -1;
}

/* Writes the address and the descriptor of a tensor. Returns the number of words in the descriptor, at most MAX_WORDS;
   -1 with an exception set. */
static int describe(PyObject *tensor, int64_t *address, int64_t *words) {
    Handle handle;
    int64_t dim, *sizes, *strides;
    int32_t dtype, device_type, device_index;
    if (locate(tensor, &handle, address))
        return -1;
    if (torch.dim(handle, &dim) || torch.sizes(handle, &sizes) || torch.strides(handle, &strides) ||
        torch.dtype(handle, &dtype) || torch.device_type(handle, &device_type) ||
        torch.device_index(handle, &device_index) || dim > MAX_DIMS) {
        PyErr_SetString(PyExc_RuntimeError, "torch does not describe a tensor, or it has too many dimensions");
        return -1;
    }
    int lazy = lazy_bits(tensor, dtype);
    if (lazy < 0)
        return -1;
    words[0] = dim;
    words[1] = dtype;
    words[2] = device_type;
    words[3] = device_index;
    words[4] = lazy;
    for (int64_t i = 0; i < dim; i++) {
        words[HEAD + 2 * i] = sizes[i];
        /* The stride of a dimension of size 1 does not matter. */
        words[HEAD + 2 * i + 1] = sizes[i] == 1 ? 1 : strides[i];
    }
    return HEAD + 2 * (int)dim;
}

typedef struct {
    PyObject_HEAD
    /* Bytearrays of int64: the object, address and descriptor of each parameter, and the address of each entry. */
    PyObject *params, *entries;
    PyObject *names;
} Look;

/* One pass over all tensors, which either records what they are, or compares them with what was recorded. */
typedef struct {
    Look *look;
    int recording;
    /* The positions in the bytearrays of the look. */
    Py_ssize_t param, entry;
    /* The result, which a recording does not have. */
    PyObject *present, *gradients, *addresses;
    int matching;
} Pass;

/* Records words, or compares them with the recorded words at a position, which it moves past them. Returns 1 if they
   are recorded or equal, 0 if they differ, -1 with an exception set. */
static int check(const Pass *pass, PyObject *list, Py_ssize_t *position, const int64_t *words, int count) {
    Py_ssize_t size = count * (Py_ssize_t)sizeof *words, used = PyByteArray_GET_SIZE(list);
    if (pass->recording) {
        if (PyByteArray_Resize(list, used + size))
            return -1;
        memcpy(PyByteArray_AS_STRING(list) + used, words, (size_t)size);
    } else if (used - *position < size || memcmp(PyByteArray_AS_STRING(list) + *position, words, (size_t)size))
        return 0;
    *position += size;
    return 1;
}

/* Checks a parameter and reads its gradient. Returns 1 if the parameter is unchanged, 0 if it changed, -1 with an
   exception set. `grads` is NULL to read `.grad`. */
static int check_param(Pass *pass, PyObject *param, PyObject *grads, Py_ssize_t i) {
    int64_t words[2 + MAX_WORDS], its_words[MAX_WORDS];
    words[0] = (int64_t)param;
    int count = describe(param, words + 1, words + 2);
    int same = count < 0 ? -1 : check(pass, pass->look->params, &pass->param, words, 2 + count);
    if (same != 1 || pass->recording)
        return same;
    PyObject *gradient = grads ? Py_NewRef(PyTuple_GET_ITEM(grads, i)) : get_grad(param);
    if (!gradient)
        return -1;
    PyTuple_SET_ITEM(pass->gradients, i, gradient);
    int64_t *address = (int64_t *)PyBytes_AS_STRING(pass->addresses) + i;
    *address = 0;
    PyBytes_AS_STRING(pass->present)[i] = gradient != Py_None;
    if (gradient == Py_None)
        return 1;
    int its_count = describe(gradient, address, its_words);
    if (its_count < 0)
        return -1;
    if (!Py_IS_TYPE(gradient, tensor_type) || its_count != count ||
        memcmp(its_words, words + 2, (size_t)count * sizeof *words))
        pass->matching = 0;
    return 1;
}

/* Checks the entries of the next state in a dict, if there is one. Returns 1 if they are unchanged, 0 if they changed,
   2 if there is no next state, -1 with an exception set. */
static int check_next_state(Pass *pass, PyObject *states, Py_ssize_t *place) {
    PyObject *key, *state;
    if (!PyDict_Next(states, place, &key, &state))
        return 2;
    int same = 1;
    Py_INCREF(state);
    for (Py_ssize_t j = 0; same == 1 && j < PyTuple_GET_SIZE(pass->look->names); j++) {
        Handle handle;
        int64_t address = 0;
        PyObject *name = PyTuple_GET_ITEM(pass->look->names, j);
        PyObject *entry = Py_XNewRef(PyDict_Check(state) ? PyDict_GetItemWithError(state, name) : NULL);
        /* An entry that is missing or not a tensor has the address 0. */
        if (entry ? PyObject_TypeCheck(entry, tensor_type) && locate(entry, &handle, &address) : !!PyErr_Occurred())
            same = -1;
        else
            same = check(pass, pass->look->entries, &pass->entry, &address, 1);
        Py_XDECREF(entry);
    }
    Py_DECREF(state);
    return same;
}

/* Checks all parameters and states, and reads the gradients. Returns as `check` does. */
static int check_all(Pass *pass, PyObject *params, PyObject *grads, PyObject *states) {
    int same = 1, next = 1;
    Py_ssize_t place = 0;
    for (Py_ssize_t i = 0; same == 1 && i < PyTuple_GET_SIZE(params); i++) {
        same = check_param(pass, PyTuple_GET_ITEM(params, i), grads, i);
        /* The state of a parameter is often near it in memory. */
        if (same == 1 && next == 1 && (next = check_next_state(pass, states, &place)) < 1)
            same = next;
    }
    while (same == 1 && next == 1)
        if ((next = check_next_state(pass, states, &place)) < 1)
            same = next;
    int all = pass->param == PyByteArray_GET_SIZE(pass->look->params) &&
              pass->entry == PyByteArray_GET_SIZE(pass->look->entries);
    return same == 1 ? all : same;
}

static PyObject *again(Look *self, PyObject *const *args, Py_ssize_t given) {
    if (given != 3)
        return PyErr_Format(PyExc_TypeError, "again takes params, grads and states");
    if (!PyDict_Check(args[2]))
        Py_RETURN_NONE;
    Pass pass = {.look = self, .matching = 1};
    PyObject *result = NULL, *params = PySequence_Tuple(args[0]);
    PyObject *grads = params && args[1] != Py_None ? PySequence_Tuple(args[1]) : NULL;
    Py_ssize_t count = params ? PyTuple_GET_SIZE(params) : 0;
    if (!params || (!grads && args[1] != Py_None))
        goto done;
    pass.present = PyBytes_FromStringAndSize(NULL, count);
    pass.gradients = PyTuple_New(count);
    pass.addresses = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int64_t));
    if (!pass.present || !pass.gradients || !pass.addresses)
        goto done;
    int same = !grads || PyTuple_GET_SIZE(grads) == count ? check_all(&pass, params, grads, args[2]) : 0;
    if (same == 1)
        result = PyTuple_Pack(4, pass.present, pass.gradients, pass.addresses, pass.matching ? Py_True : Py_False);
    else if (same == 0)
        result = Py_NewRef(Py_None);
done:
    Py_XDECREF(pass.present);
    Py_XDECREF(pass.gradients);
    Py_XDECREF(pass.addresses);
    Py_XDECREF(params);
    Py_XDECREF(grads);
    return result;
}

static PyObject *new_look(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(options)) {
    PyObject *params, *states, *names;
    if (!PyArg_ParseTuple(args, "O!O!O!", &PyTuple_Type, &params, &PyDict_Type, &states, &PyTuple_Type, &names))
        return NULL;
    Look *self = (Look *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->names = Py_NewRef(names);
    self->params = PyByteArray_FromStringAndSize(NULL, 0);
    self->entries = PyByteArray_FromStringAndSize(NULL, 0);
    Pass pass = {.look = self, .recording = 1};
    if (!self->params || !self->entries || check_all(&pass, params, NULL, states) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void delete_look(Look *self) {
    Py_XDECREF(self->params);
    Py_XDECREF(self->entries);
    Py_XDECREF(self->names);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef look_methods[] = {
    {"again", (PyCFunction)(void (*)(void))again, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyTypeObject look_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "fused_lwlr_look.Look",
    .tp_basicsize = sizeof(Look),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = new_look,
    .tp_dealloc = (destructor)delete_look,
    .tp_methods = look_methods,
};

/* describe(tensor) returns the address and the words of the descriptor, as bytes. */
static PyObject *describe_one(PyObject *Py_UNUSED(module), PyObject *tensor) {
    int64_t words[1 + MAX_WORDS];
    int count = describe(tensor, words, words + 1);
    return count < 0 ? NULL : PyBytes_FromStringAndSize((char *)words, (1 + count) * (Py_ssize_t)sizeof *words);
}

/* bind(Tensor, Parameter, functions, handle_offset) takes the addresses of torch's functions as bytes. */
static PyObject *bind(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer functions;
    if (!PyArg_ParseTuple(
            args, "O!O!y*n", &PyType_Type, &tensor_type, &PyType_Type, &parameter_type, &functions, &handle_offset))
        return NULL;
    Py_ssize_t size = functions.len;
    if (size == sizeof torch)
        memcpy(&torch, functions.buf, sizeof torch);
    PyBuffer_Release(&functions);
    if (size != sizeof torch)
        return PyErr_Format(PyExc_TypeError, "bind takes %zu addresses", sizeof torch / sizeof(void *));
    /* The types, and the getter that belongs to its type, are kept for good. */
    Py_INCREF(tensor_type);
    Py_INCREF(parameter_type);
    PyObject *getter = PyObject_GetAttr((PyObject *)tensor_type, grad_name);
    if (getter && !Py_IS_TYPE(getter, &PyGetSetDescr_Type))
        return PyErr_Format(PyExc_ImportError, "torch.Tensor.grad is not implemented in C");
    own_grad = getter ? ((PyGetSetDescrObject *)getter)->d_getset : NULL;
    return getter ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef methods[] = {
    {"describe", describe_one, METH_O, NULL},
    {"bind", bind, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "fused_lwlr_look", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit_fused_lwlr_look(void) {
    grad_name = PyUnicode_InternFromString("grad");
    is_conj_name = PyUnicode_InternFromString("is_conj");
    is_neg_name = PyUnicode_InternFromString("is_neg");
    PyObject *module = grad_name && is_conj_name && is_neg_name ? PyModule_Create(&definition) : NULL;
    if (module && PyModule_AddType(module, &look_type))
        Py_CLEAR(module);
    return module;
}
